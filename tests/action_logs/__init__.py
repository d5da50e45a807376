"""What the engine does, action by action, in worlds where operations end when the test says: its specification.

A log under `golden/` has one line an event (a unit is used, a pass begins, ...) with the actions that the engine took
because of it. `python -m tests.action_logs.write` writes the logs anew; whoever changes one says why in that commit.
"""
