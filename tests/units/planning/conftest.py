"""What the tests of planning share: strategies, backends and workers of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hiremate_lightning.planning.solvers import base
from hiremate_lightning.planning.solvers.worker import Worker


@pytest.fixture
def _own_strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget, after the test, the strategies that it registers."""
    monkeypatch.setattr(base, "_STRATEGIES", dict(base._STRATEGIES))


@pytest.fixture
def own_worker() -> Iterator[Worker]:
    """A process that solves for this test alone."""
    own = Worker()
    yield own
    own.close()
