"""The platform in real containers: images, docker-compose.yml, and what becomes of the work when
containers go."""
