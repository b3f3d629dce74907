"""The verbs of ``tilewright``: arguments and wiring; the only place to join models and compiler."""
