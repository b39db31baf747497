from tests.support.threads import one_torch_thread

__all__ = ["one_torch_thread"]
