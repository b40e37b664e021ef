"""Callbacks: calls the targets that want to hear of transitions, and keeps at it until each has heard.

A record on `callbacks` is one event for one target. It waits here for its target's turn (`lanes`), the attempt is
numbered and written down (`begin`), the call is made (`calling`), `core.delivery` decides, and the decision is
written down (`settle`); only then is the record acknowledged. What is to be tried again waits in PostgreSQL until the
`releaser` writes its record anew.

Guarantees
- A callback owed is delivered, scheduled or dead with its reason on `callbacks.dead`; all its attempts carry one
  webhook-id, and each is numbered before it is made.
- A record that comes twice, late or after a rebalance makes no second call: `begin` compares the attempt number.
- A target that hangs holds a few slots only, and what would wait for it too long goes back to PostgreSQL.

What a crash does, by where it strikes
- Before `begin`: the record is delivered again. Nothing is lost or doubled.
- After `begin`, before or during the call: the redelivered record finds its attempt taken; the releaser makes the next
  attempt once the horizon has passed. The target may hear twice, with the same webhook-id.
- After the call, before `settle`: the same, so a delivered callback is delivered again.
- After the record on `callbacks.dead`, before `settle`: the same; there may be two dead records of one id.
- After `settle`, before the acknowledgement: the redelivered record changes nothing.
- In the releaser, between its statement and its records: what was due comes due again after a while.

In doubt it calls again.
"""
