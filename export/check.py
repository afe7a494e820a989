from __future__ import annotations
from dataclasses import dataclass
@dataclass(frozen=True)
class SelfCheck:
    engines: dict
    draft: dict
def check_bundle(*a):
    return SelfCheck({}, {})
