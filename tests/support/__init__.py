"""Helpers that tests of several folders share: servers, running services, callback targets,
waiting."""
