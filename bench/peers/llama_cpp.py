"""llama.cpp as an engine of a comparison, through llama-cpp-python's low-level functions."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import llama_cpp
import numpy as np

from bench.peers.gguf_copy import gguf_sizes
from bench.peers.worker import Generated, Loaded


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, user_data: object) -> None:
    """Its log is long, and not what is asked for."""


class LlamaCpp:
    """A GGUF file in a context just large enough; flash attention as llama.cpp chooses it.

    ``is_float``: with a cache of float32 and plain attention, so that all is float32 where the
    file's weights are.
    """

    def __init__(
        self,
        path: Path,
        *,
        num_threads: int,
        max_context: int,
        max_users: int = 1,
        is_float: bool = False,
    ) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        if not model:
            raise ValueError(f"{path}: llama.cpp cannot load it")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = max_users * max_context
        settings.n_seq_max = max_users
        settings.n_threads = settings.n_threads_batch = num_threads
        if is_float:
            settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
            settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama_cpp.llama_init_from_model(model, settings)
        if not self._context:
            raise ValueError(f"{path}: llama.cpp cannot make a context of {max_context}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(max(max_users, max_context), 0, 1)
        self._max_context = max_context
        self._path = path

    def loaded(self) -> Loaded:
        """The bytes of the file's tensors, and those of them that a step reads."""
        return gguf_sizes(self._path)

    def generate(
        self, tokens: Sequence[int], num_tokens: int, *, ends: Collection[int] = ()
    ) -> Generated:
        """Continue greedily; logits are computed for the last token alone. A token of ``ends``
        is the last one.
        """
        assert len(tokens) + num_tokens <= self._max_context  # the batch has no more room
        llama_cpp.llama_memory_clear(self._memory, True)
        started = time.perf_counter()
        output = [self._step(tokens, 0)]
        times = [time.perf_counter() - started]
        for position in range(len(tokens), len(tokens) + num_tokens - 1):
            if output[-1] in ends:
                break
            output.append(self._step(output[-1:], position))
            times.append(time.perf_counter() - started)
        return Generated(tuple(output), tuple(times))

    def generate_together(
        self, tokens: Sequence[int], num_tokens: int, num_users: int
    ) -> Generated:
        """As :meth:`generate`, for so many users of one prompt at a time: it is computed once and
        copied, as llama.cpp's own bench of batches does.
        """
        llama_cpp.llama_memory_clear(self._memory, True)
        started = time.perf_counter()
        first = self._step(tokens, 0)
        for user in range(1, num_users):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, user, -1, -1)
        output = [[first] for _ in range(num_users)]
        times = [time.perf_counter() - started]
        for position in range(len(tokens), len(tokens) + num_tokens - 1):
            for user in range(num_users):
                self._put(user, output[user][-1], position, user, wants_logits=True)
            self._decode(num_users)
            for user in range(num_users):
                output[user].append(int(self._logits_of(user).argmax()))
            times.append(time.perf_counter() - started)
        return Generated(tuple(output[0]), tuple(times))

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """The logits ``[vocab]`` behind a text, which is computed in one piece."""
        llama_cpp.llama_memory_clear(self._memory, True)
        return self._logits(tokens, 0).copy()

    def _step(self, tokens: Sequence[int], position: int) -> int:
        return int(np.argmax(self._logits(tokens, position)))

    def _logits(self, tokens: Sequence[int], position: int, user: int = 0) -> np.ndarray:
        for index, token in enumerate(tokens):
            is_last = index == len(tokens) - 1
            self._put(index, token, position + index, user, wants_logits=is_last)
        self._decode(len(tokens))
        return self._logits_of(-1)

    def _put(self, index: int, token: int, position: int, user: int, *, wants_logits: bool) -> None:
        batch = self._batch
        batch.token[index] = token
        batch.pos[index] = position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = user
        batch.logits[index] = wants_logits

    def _decode(self, num_tokens: int) -> None:
        self._batch.n_tokens = num_tokens
        code = llama_cpp.llama_decode(self._context, self._batch)
        if code:
            raise RuntimeError(f"llama_decode failed with {code}")

    def _logits_of(self, index: int) -> np.ndarray:
        logits = llama_cpp.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(logits, (self._vocab_size,))
