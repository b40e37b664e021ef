"""Callbacks: calls the targets that want to hear of transitions, and keeps at it until each has heard.

A record on `callbacks` is one event for one target. Its target's judge (`targets`) says whether it may be called: then it
waits for the target's turn (`lanes`), the attempt is numbered and written down (`ledger`) and the record acknowledged, the
call is made (`calling`), `core.delivery` decides (`fates`), and the decision is written down. What is to be
tried again waits in PostgreSQL until the `releaser` writes its record anew, on `callbacks.diverted`, which has a small
pool of its own here.

What is owed to an abnormal or disabled target is held: in PostgreSQL, and on no topic. Some of it is let go from time to
time, one callback to see whether the target answers, or at a bounded rate once it does (`core.drain`); it goes the
diverted way, too. `core.health` says when a target is abnormal.

Guarantees
- A callback owed is delivered, scheduled, held or dead with its reason on `callbacks.dead`; all its attempts carry one
  webhook-id, and each is numbered before it is made. What it came to is on `callbacks.results`.
- A record that comes twice, late or after a rebalance makes no second call: the ledger compares the attempt number.
- Only addresses that are public or allowed are connected to (`egress`), and no answer costs more than its deadline and a
  few kilobytes (`calling`). In doubt an address is refused.
- A target that hangs holds a few slots only, none once it has turned out slow, and what would wait for it too long goes
  back to PostgreSQL.
- A target is an address as one namespace calls it (`core.target`), and shares no verdict, rate, slot or operator's word with another's.
- A target is judged by one process, whose partition its records are on, and its health outlives that process. Records are keyed by
  the URL alone, as before there were namespaces: processes of two releases agree whose a record is, and what this process sees of an
  address in one namespace tells it what to think of itself in all.
- What fails while this process suspects itself uses up nobody's schedule, whoever makes the next attempt.
- A target's rate holds over both paths together (`core.rates`); a new process begins its clock anew.
- Callbacks that ask for order are called one after the other, each when the one before has been delivered or is dead.

What a crash does, by where it strikes
- Before the attempt is written down: the record is delivered again. Nothing is lost or doubled.
- After that, before or during the call: the releaser makes the next attempt once the horizon has passed; the record, if
  it is delivered again, finds its attempt taken. The target may hear twice, with the same webhook-id.
- After the call, before its fate is written down: the same, so a delivered callback is delivered again.
- After the record on `callbacks.dead` or `callbacks.results`: the same; there may be two of one id.
- In the releaser, between its statement and its records: what was due comes due again after a while.
- A second's worth of slow calls may be forgotten.

In doubt it calls again.
"""
