"""The nightly flow: a fan-out, a child flow, an approval, and a failure to recover from."""
