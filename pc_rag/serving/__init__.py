"""What every framework adapter needs: a model opened once, and calls of it with replies.

An adapter translates its framework's types to a ``Call`` and a ``Reply`` back; what lies between
is here, so that no adapter holds an algorithm.
"""

from pc_rag.serving.asynchronous import begun, texts
from pc_rag.serving.call import Call, ToolChoice, generation_config
from pc_rag.serving.host import Hold, Host, HostSettings, OwnHold, open_host
from pc_rag.serving.model_object import ModelObject, translated
from pc_rag.serving.options import CallDefaults, begin_call, tool_choice_of
from pc_rag.serving.reply import Reply, ReplyStream

__all__ = [
    "Call",
    "CallDefaults",
    "Hold",
    "Host",
    "HostSettings",
    "ModelObject",
    "OwnHold",
    "Reply",
    "ReplyStream",
    "ToolChoice",
    "begin_call",
    "begun",
    "generation_config",
    "open_host",
    "texts",
    "tool_choice_of",
    "translated",
]
