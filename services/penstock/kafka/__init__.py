"""Apache Kafka, by aiokafka and (for the stream processors) faust-streaming."""
