"""Role markers of a chat template as token ids, one by one, for text that is laid out in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pc_rag.errors import ModelError
from pc_rag.model.chat import ChatFormat
from pc_rag.types import Role

if TYPE_CHECKING:
    from pc_rag.model.tokenizer import TextTokenizer
    from pc_rag.types import TokenIds

_TURNS = (Role.USER, Role.ASSISTANT, Role.USER)


class TemplateEncoder:
    """What opens and closes a turn, found by rendering the template with sentinels.

    A prompt is ``beginning()``, then for every turn ``role_open``, its text and ``role_close``,
    then ``generation_prompt()``.

    Args:
        tokenizer: The model's tokenizer with its chat template, if it has one.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._format = ChatFormat(tokenizer)
        self._cache: dict[tuple[str, Role | None, bool], TokenIds] = {}
        self._placeholder_id: int | None = None

    def beginning(self) -> TokenIds:
        """BOS, if the tokenizer or the template puts one at the start of every prompt."""
        return self._remembered("beginning", None, is_first=True)

    def role_open(self, role: Role, *, is_first: bool) -> TokenIds:
        """What stands before a message's text, without what belongs to the message before it.

        Args:
            role: Who speaks.
            is_first: The turn opens the prompt. It then holds what the template puts before a
                conversation (often a system message of its own), but not ``beginning()``.

        Raises:
            ModelError: The template has no such turn.
        """
        return self._remembered("open", role, is_first=is_first)

    def role_close(self, role: Role) -> TokenIds:
        """What stands behind a message's text.

        Raises:
            ModelError: The template has no such turn.
        """
        return self._remembered("close", role, is_first=False)

    def generation_prompt(self) -> TokenIds:
        """What opens the assistant's answer."""
        return self._remembered("prompt", None, is_first=False)

    def encode_text(self, text: str) -> TokenIds:
        """Token ids of plain text; control tokens in it stay text."""
        return self._tokenizer.encode_text(text)

    def placeholder_id(self) -> int:
        """The unknown token; the token of a space where it has another meaning or is missing.

        Tokenizers that write every byte have none, though many name one: most often what ends a
        text, which a model reads as a border. Nor is one neutral that begins a text, or marks the
        turns of the template.

        Raises:
            ModelError: The tokenizer has neither token.
        """
        if self._placeholder_id is None:  # two threads may both find it, and find the same
            self._placeholder_id = self._find_placeholder()
        return self._placeholder_id

    def space_id(self) -> int:
        """The last token of the text of one space: where it has several, the space itself.

        Raises:
            ModelError: The tokenizer drops spaces.
        """
        token_ids = self.encode_text(" ")
        if not token_ids:
            raise ModelError(
                "the tokenizer has no token for a space, which fills up arguments and, where there "
                "is no unknown token, stands for parameters; give the parameters pad='none', or "
                "use a model whose tokenizer keeps spaces"
            )
        return token_ids[-1]

    def _find_placeholder(self) -> int:
        tokenizer = self._tokenizer.hf_tokenizer
        unknown_id = self._tokenizer.unknown_id
        begins = {*self._tokenizer.bos_ids, tokenizer.bos_token_id}
        if unknown_id is None or unknown_id in self._tokenizer.eos_ids | begins:
            return self.space_id()
        text = self._tokenizer.backend.id_to_token(unknown_id)
        is_control = str(text) in (self._tokenizer.chat_template or "")
        return self.space_id() if is_control else unknown_id

    def _remembered(self, what: str, role: Role | None, *, is_first: bool) -> TokenIds:
        key = (what, role, is_first)
        if key not in self._cache:  # two threads may both compute it, and get the same
            self._cache[key] = self._compute(what, role, is_first=is_first)
        return self._cache[key]

    def _compute(self, what: str, role: Role | None, *, is_first: bool) -> TokenIds:
        encode = self._tokenizer.encode_template
        if role is None:
            return self._find_bos() if what == "beginning" else encode(self._prompt_text())
        if what == "close":
            return encode(self._close_text(role))
        if not is_first:
            return encode(self._open_text(role))
        bos_ids = self.beginning()
        leading = encode(self._leading_text(role), is_first=True)
        return leading[len(bos_ids) :] if leading[: len(bos_ids)] == bos_ids else leading

    def _find_bos(self) -> TokenIds:
        if self._tokenizer.bos_ids:
            return self._tokenizer.bos_ids
        bos_id = self._tokenizer.hf_tokenizer.bos_token_id
        leading = self._tokenizer.encode_template(self._leading_text(Role.USER), is_first=True)
        later = self._tokenizer.encode_template(self._open_text(Role.USER))
        if bos_id is None or leading[:1] != (bos_id,) or later[:1] == (bos_id,):
            return ()  # a token that opens every turn is no BOS, whatever it is called
        return (bos_id,)

    def _leading_text(self, role: Role) -> str:
        roles = {
            Role.SYSTEM: (Role.SYSTEM, Role.USER),
            Role.USER: (Role.USER,),
            Role.ASSISTANT: (Role.ASSISTANT, Role.USER),
        }
        return self._controls(*roles[role], wanted=role)[0]

    def _close_text(self, role: Role) -> str:
        if role is Role.USER:
            return self._controls(Role.USER, wanted=role)[-1]
        if role is Role.ASSISTANT:
            return self._controls(Role.USER, Role.ASSISTANT, wanted=role)[-1]
        between = self._controls(Role.SYSTEM, Role.USER, wanted=role)[1]
        user_open = self._open_text(Role.USER)
        if not between.endswith(user_open):
            raise _no_turn(role, "it writes system text inside the user's turn")
        return between.removesuffix(user_open)

    def _open_text(self, role: Role) -> str:
        if role is Role.USER:
            between = self._controls(*_TURNS, wanted=role)[2]
            return _behind(self._close_text(Role.ASSISTANT), between, role)
        middle = (Role.USER, role, Role.USER)
        between = self._controls(*middle, wanted=role)[1]
        return _behind(self._close_text(Role.USER), between, role)

    def _prompt_text(self) -> str:
        texts = self._format.control_texts((Role.USER,), add_generation_prompt=True)
        if texts is None:
            raise _no_turn(Role.USER, "it refuses a conversation of one user message")
        return _behind(self._close_text(Role.USER), texts[-1], Role.ASSISTANT)

    def _controls(self, *roles: Role, wanted: Role) -> tuple[str, ...]:
        texts = self._format.control_texts(roles)
        if texts is None:
            named = ", ".join(role.value for role in roles)
            raise _no_turn(wanted, f"it refuses or reorders a conversation of {named}")
        return texts


def _behind(close: str, text: str, role: Role) -> str:
    if not text.startswith(close):
        raise _no_turn(role, "it closes a turn differently at the end than in the middle")
    return text.removeprefix(close)


def _no_turn(role: Role, reason: str) -> ModelError:
    return ModelError(
        f"the model's chat template has no {role.value} turn that stands by itself: {reason}. "
        f"Put the {role.value} text into a user turn, or give the tokenizer another chat template"
    )
