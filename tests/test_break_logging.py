"""The simulation and the explorer silenced the logger "headrace" for the rest of the process: every later fault went unseen."""

import logging

from headrace.runtime import Simulation
from headrace.runtime.explorer_world import Setup, SmallWorld


def test_a_simulation_and_a_small_world_leave_the_loggers_as_they_are_and_log_nothing(caplog):
    logger = logging.getLogger("headrace")
    before = logger.level
    with caplog.at_level(logging.DEBUG):
        assert Simulation(seed=3).run(200).failure is None
        SmallWorld(Setup(name="one", requests=("text",)))
    assert logger.level == before
    assert logger.isEnabledFor(logging.ERROR)
    assert not [record for record in caplog.records if record.name.startswith("headrace")]
