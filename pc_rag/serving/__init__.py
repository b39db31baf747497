"""What every framework adapter needs: a model opened once, and calls of it with replies.

An adapter translates its framework's types to a ``Call`` and a ``Reply`` back; what lies between
is here, so that no adapter holds an algorithm.
"""

from pc_rag.serving.asynchronous import begun, texts
from pc_rag.serving.call import Call, ToolChoice, generation_config
from pc_rag.serving.host import Hold, Host, HostSettings, open_host
from pc_rag.serving.reply import Reply, ReplyStream

__all__ = [
    "Call",
    "Hold",
    "Host",
    "HostSettings",
    "Reply",
    "ReplyStream",
    "ToolChoice",
    "begun",
    "generation_config",
    "open_host",
    "texts",
]
