"""Text from token ids as they come, never half a character.

The rule that makes streaming exact: text is let out only where no later token can change it, so
the pieces joined are the decoded whole. Owns that rule; which ids there are is the tokenizer's
business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_NUM_CONTEXT_TOKENS = 8
"""How far back a decoder looks: a character has at most 4 bytes, so at most 4 tokens."""


class Detokenizer:
    """One growing answer. `add` a token and get the text that it completes, `finish` for the rest.

    Held back are an unfinished character and, for tokenizers with byte fallback, an unfinished run
    of byte tokens, because one bad byte turns the whole run into replacement characters.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        ends_no_text: Callable[[int], bool],
        context: Sequence[int],
    ) -> None:
        """`ends_no_text`: whether the text before a token and its own may yet change: byte tokens,
        and those that show nothing. `context`: the prompt's ids, so that a space between prompt and
        answer is not lost.
        """
        self._decode = decode
        self._ends_no_text = ends_no_text
        start = max(len(context) - _NUM_CONTEXT_TOKENS, 0)
        while start and ends_no_text(context[start]):
            start -= 1
        self._window = list(context[start:])
        self._num_shown_tokens = len(self._window)
        self._shown = decode(self._window).rstrip(_REPLACEMENT)

    def add(self, token_id: int) -> str:
        """The text that is certain now and was not before; may be empty."""
        self._window.append(token_id)
        # Bytes on both sides of a token that shows nothing are one run, so it ends none.
        if self._ends_no_text(token_id):
            return ""
        text = self._decode(self._window)
        if len(text) <= len(self._shown) or text.endswith(_REPLACEMENT):
            return ""
        new = text[len(self._shown) :]
        # The tokens just shown stay as context: some decoders treat a first token differently.
        self._window = self._window[self._num_shown_tokens :]
        self._num_shown_tokens = len(self._window)
        self._shown = self._decode(self._window)
        return new

    def finish(self) -> str:
        """What was held back; unfinished characters come out as U+FFFD."""
        text = self._decode(self._window)
        new, self._shown = text[len(self._shown) :], text
        return new
