"""The platform of a handler pool, for tests of the pool alone."""


class RecordingPlatform:
    """Notes what the loop of handlers requests (`worker.ports.Platform`).

    Args:
        on_result: called with each result, in place of noting it.
    """

    def __init__(self, on_result=None):
        self.results, self.announced, self.turns_ended, self.blocks = [], [], [], []
        self.add = on_result or self.results.append
        self.announce = self.announced.append
        self.ended = self.turns_ended.append
        self.block = self.blocks.append
