from tests.support.shared_schemas import shared_schema
from tests.support.threads import one_torch_thread

__all__ = ["one_torch_thread", "shared_schema"]
