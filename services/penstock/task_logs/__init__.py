"""The service `tasklogs`: moves the lines of task logs from their topic into segments.

Guarantees
- A line is in one segment. A segment's object is stored first. Its row is inserted by the statement
  that moves the reader's offset, and only if that offset is still its first one. So a process that
  lost its partition inserts nothing, and its object is deleted.
- A line on the topic stays readable: the gateway reads what is not in a segment from the topic.
- One row for each segment. The cost of PostgreSQL does not grow with lines.
- A log is deleted after `logs_days`: first the row, then the object.

While the object store is away, partitions are held, and lines stay on the topic, until its
retention deletes them. Readers show the lines that are missing then.
"""
