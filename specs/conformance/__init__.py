"""The conformance kit: what headrace promises, as cases that any implementation can be run against.

Owns: the protocol between kit and target (`protocol`, `lines`), the reading of cases (`cases`), their steps (`steps`, `frames`), the
verdicts (`runner`) and what is made of them (`report`, `pages`). It uses the codec to write frames and to read messages, and never
the runtime: what is under test is reached through an adapter only. `headrace conform` and the pytest plugin are its two faces.

Importing this package loads nothing else; the modules load numpy and msgspec when they are used.
"""
