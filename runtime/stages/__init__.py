"""The stages: plain-data objects with one non-blocking entry point each. They import no clock, no thread, no randomness.

A stage's `step` takes one message and returns an outbox; it never waits and never looks at the world except through the facts
it is handed. Drivers (threads, simulation, explorer) call `step` and commit the outbox after it returns, so the object that is
explored exhaustively is the object that runs in production.
"""
