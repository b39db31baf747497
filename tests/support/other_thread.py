"""What the owner of a model is told who calls it beside pc-rag."""

from __future__ import annotations

import threading

from pc_rag.errors import ModelError
from pc_rag.model.hf_attention import own_attention


def errors_of_the_owner(model, token_ids, running):
    """The messages of ``ModelError`` that a call on another thread gets during a pass."""
    errors = []

    def call():
        try:
            model(token_ids)
        except ModelError as error:
            errors.append(str(error))

    with own_attention(model, running):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    return errors
