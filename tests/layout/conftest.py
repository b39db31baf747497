from tests.support.shared_schemas import shared_schema

__all__ = ["shared_schema"]
