"""Probe, transcode and thumbnail of video files: a pipeline of three stages on Penstock."""
