"""Decides how flows advance: graphs of tasks in which a waiting node holds nothing.

`plan` is what a definition prescribes, `state` is what PostgreSQL stores, `messages` are what a
flow can receive, and `decide` turns all three into the next state and actions. Nothing here reads a
clock, a database or an expression: the owner of the flow does, and reports what it found.
`simulation` is an owner with a clock of its own.

It guarantees, in any order and number in which messages arrive:

- a flow that is not final has a live node, an eligible node that a pause holds, or follow-up work
  in the decision itself;
- a join starts its node once per generation, and a skipped branch never keeps it waiting;
- no node and no item starts in a flow that is paused, stopping or final;
- a flow is final only when none of its children is live.

When in doubt, it starts nothing: an ending that does not belong to the current generation of its
node changes nothing.
"""
