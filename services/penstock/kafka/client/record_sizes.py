"""The sizes of records, of which topics and clients are made."""

# Kafka's own default for the largest record.
RECORD_BYTES = 1_048_588
# A rejection carries its original in base64, and the original may be as large as a record can be.
REJECTION_BYTES = 2 * RECORD_BYTES
