"""A schema of cities, and the policies that schemas are run under."""

from __future__ import annotations

import pytest

from pc_rag.config import EngineConfig
from pc_rag.types import PositionPolicy, Visibility

CITIES = """
<schema name="cities">
  <system>You know cities.</system>
  <user>
    Plan a trip.
    <module name="city">We go to Rome by train.</module>
    <union>
      <module name="short">Three days.</module>
      <module name="long">Two weeks, with a day at the sea, and museums.</module>
    </union>
    <module name="budget">Spend little.</module>
  </user>
</schema>
"""


def config_of(policy, visibility, **changes):
    changes = {"prefix_cache_bytes": 0} | changes
    return EngineConfig(position_policy=policy, visibility=visibility, **changes)


def policies(test):
    test = pytest.mark.parametrize("policy", list(PositionPolicy))(test)
    return pytest.mark.parametrize("visibility", [Visibility.PREFIX, Visibility.MODULE])(test)
