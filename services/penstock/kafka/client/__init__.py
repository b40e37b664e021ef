"""The clients of Kafka: aiokafka, with what it lacks and what it does wrong mended."""
