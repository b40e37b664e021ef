"""Stream processors on Faust, and what they write: results, the outbox, rejections."""
