"""The parts of an emitted ttnn file that run the model: state, the two steps, the command line."""

from __future__ import annotations

STEPS = '''\
class Model:
    """Weights, caches and rotations on the chips, and the two steps over them."""

    def __init__(self, mesh_device, weights: tuple[dict, list[dict]]) -> None:
        self.device = mesh_device
        self.outside, self.layers = weights
        self.caches = [self.blank_caches(i) for i in range(NUM_LAYERS)]
        self.cos, self.sin = [], []
        for frequencies, (_, _, factor) in zip(self.outside["frequencies"], ROTATIONS):
            angles = torch.outer(torch.arange(CAPACITY).float(), frequencies.float())
            angles = (
                angles.repeat_interleave(2, -1) if INTERLEAVED else torch.cat((angles, angles), -1)
            )
            self.cos.append(self.send(angles.cos() * factor, ttnn.bfloat16))
            self.sin.append(self.send(angles.sin() * factor, ttnn.bfloat16))
        pages = torch.arange(BATCH * PAGES).reshape(BATCH, PAGES)
        self.pages = self.send(pages, ttnn.int32)
        # prefill wants rows of a multiple of 32 bytes; what is added is never read
        self.prompt_pages = torch.nn.functional.pad(pages, (0, -PAGES % 8))
        self.prompt_pairs = self.step_pairs = None
        if INTERLEAVED:
            self.prompt_pairs = self.pairs(1)
            self.step_pairs = ttnn.to_memory_config(self.pairs(BATCH), users(BATCH, TILE))

    def blank_caches(self, layer: int) -> dict:
        def blank(dtype, *shape: int) -> ttnn.Tensor:
            return ttnn.zeros(shape, dtype, ttnn.TILE_LAYOUT, self.device, DRAM)

        if layer not in STATES:
            shape = (BATCH * PAGES, NUM_KV_HEADS, PAGE, HEAD_DIM)
            return {kind: blank(cache_dtype(layer, kind), *shape) for kind in ("k", "v")}
        (channels, count), memory = STATES[layer]
        window = [blank(ttnn.bfloat16, 1, 1, TILE, channels) for _ in range(count)]
        return {"window": window, "memory": blank(ttnn.float32, BATCH, *memory)}

    def pairs(self, count: int) -> ttnn.Tensor:
        """Tiles that turn (x, y) into (-y, x), for interleaved rotations."""
        turn = torch.block_diag(*[torch.tensor([[0.0, 1.0], [-1.0, 0.0]])] * (TILE // 2))
        return self.send(turn.repeat(1, 1, count, 1), ttnn.bfloat16, ttnn.TILE_LAYOUT)

    def host(self, values, dtype, layout=ttnn.ROW_MAJOR_LAYOUT) -> ttnn.Tensor:
        """The same on every chip."""
        mapper = ttnn.ReplicateTensorToMesh(self.device)
        dense = torch.as_tensor(values)
        return ttnn.from_torch(dense, dtype=dtype, layout=layout, mesh_mapper=mapper)

    def send(self, values, dtype, layout=ttnn.ROW_MAJOR_LAYOUT) -> ttnn.Tensor:
        return ttnn.to_device(self.host(values, dtype, layout), self.device, memory_config=DRAM)

    def prefill(self, user: int, tokens: list[int]) -> torch.Tensor:
        """Logits behind the last token, ``[VOCAB]``; the prompt runs LENGTH tokens at a time."""
        if not tokens or -(-len(tokens) // LENGTH) * LENGTH > CAPACITY:
            raise SystemExit(f"a prompt of {len(tokens)} tokens; allowed: 1 to {CAPACITY}")
        row = self.prompt_pages[user : user + 1]
        for start in range(0, len(tokens), LENGTH):
            chunk = tokens[start : start + LENGTH]
            last = len(chunk) - 1
            chunk = chunk + [0] * (LENGTH - len(chunk))
            at = torch.arange(start, start + LENGTH).reshape(1, -1)
            new = row[:, start // PAGE : (start + LENGTH) // PAGE]
            positions = self.send(at, ttnn.uint32)
            step = PromptStep(
                tokens=self.send([chunk], ttnn.uint32),
                cos=[rotation(positions, values) for values in self.cos],
                sin=[rotation(positions, values) for values in self.sin],
                pairs=self.prompt_pairs,
                start=self.send([start], ttnn.int32),
                pages=self.send(row, ttnn.int32),
                new_pages=self.send(new, ttnn.int32),
                last=last // TILE * TILE,
                user=user,
                count=last + 1,
                is_first=start == 0,
                real=self.real_rows(last + 1) if STATES else None,
            )
            logits = prefill(self, step)
        return self.fetch(logits)[last % TILE]

    def real_rows(self, count: int) -> ttnn.Tensor:
        """1 for the rows of a prompt, 0 for the rows after them."""
        rows = (torch.arange(LENGTH) < count).float().reshape(1, 1, -1, 1)
        return self.send(rows, ttnn.float32, ttnn.TILE_LAYOUT)

    def fetch(self, logits: ttnn.Tensor) -> torch.Tensor:
        """``[32, VOCAB]`` on the host, from the first chip."""
        first = ttnn.get_device_tensors(logits)[0]
        return ttnn.to_torch(first).reshape(TILE, -1)[:, :VOCAB].float()

    def inputs(self, tokens: list[int], positions: list[int]) -> dict[str, ttnn.Tensor]:
        """What a decode step reads, on the host; position -1: no user there."""
        ids = torch.nn.functional.pad(torch.tensor([tokens]), (0, TILE - BATCH))
        at = torch.tensor(positions)
        return {
            "tokens": self.host(ids, ttnn.uint32),
            "positions": self.host(at, ttnn.int32),
            "rows": self.host(at.clamp(min=0).reshape(1, -1), ttnn.uint32),
        }

    def decode(self, given: dict[str, ttnn.Tensor]) -> ttnn.Tensor:
        """Logits ``[1, 1, 32, VOCAB and padding]`` on the chips; a row a user."""
        cos, sin = (
            [
                ttnn.to_memory_config(
                    ttnn.transpose(rotation(given["rows"], values), 1, 2),
                    users(BATCH, values.shape[-1]),
                )
                for values in tables
            ]
            for tables in (self.cos, self.sin)
        )
        step = DecodeStep(
            given["tokens"], given["positions"], cos, sin, self.step_pairs, self.pages
        )
        return decode(self, step)

    def capture_trace(self, given: dict[str, ttnn.Tensor]) -> tuple[int, ttnn.Tensor]:
        """The number of a recorded decode step, and where its logits will be."""
        self.decode(given)  # compiles the kernels, which a recording cannot
        trace = ttnn.begin_trace_capture(self.device, cq_id=0)
        logits = self.decode(given)
        ttnn.end_trace_capture(self.device, trace, cq_id=0)
        return trace, logits


def rotation(positions: ttnn.Tensor, table: ttnn.Tensor) -> ttnn.Tensor:
    """Rows of a table of cosines or sines, ``[1, 1, positions, channels]``."""
    found = ttnn.embedding(positions, table, layout=ttnn.TILE_LAYOUT, memory_config=DRAM)
    return ttnn.unsqueeze_to_4D(found)


@dataclass(frozen=True)
class PromptStep:
    tokens: ttnn.Tensor  # uint32 [1, LENGTH]
    cos: list[ttnn.Tensor]  # for every rotation
    sin: list[ttnn.Tensor]
    pairs: ttnn.Tensor | None
    start: ttnn.Tensor  # int32 [1]: the position of the first token
    pages: ttnn.Tensor  # int32: the user's pages
    new_pages: ttnn.Tensor  # those this step fills
    last: int  # the row of tokens, a multiple of 32, whose logits are wanted
    user: int
    count: int  # tokens of the prompt in this step
    is_first: bool
    real: ttnn.Tensor | None  # float32 [1, 1, LENGTH, 1]: 0 after the prompt


@dataclass(frozen=True)
class DecodeStep:
    tokens: ttnn.Tensor  # uint32 [1, 32]
    positions: ttnn.Tensor  # int32 [BATCH]
    cos: list[ttnn.Tensor]  # for every rotation
    sin: list[ttnn.Tensor]
    pairs: ttnn.Tensor | None
    pages: ttnn.Tensor  # int32 [BATCH, pages of a user]
'''

MAIN = '''\
def generate(model: Model, prompts: list[list[int]], count: int, *, traced: bool):
    """Greedy continuations: a list of token ids for each prompt, a token at a time."""
    found = [[int(model.prefill(user, prompt).argmax())] for user, prompt in enumerate(prompts)]
    idle = BATCH - len(prompts)
    given: dict[str, ttnn.Tensor] = {}
    trace = logits = None
    for number in range(count - 1):
        at = [len(prompt) + number for prompt in prompts]
        if max(at) >= CAPACITY:
            break
        tokens = [each[-1] for each in found] + [0] * idle
        fresh = model.inputs(tokens, at + [-1] * idle)
        if not given:
            given = {n: ttnn.to_device(t, model.device) for n, t in fresh.items()}
            if traced:
                trace, logits = model.capture_trace(given)
        else:
            for name, tensor in fresh.items():
                ttnn.copy_host_to_device_tensor(tensor, given[name])
        if trace is None:
            logits = model.decode(given)
        else:
            ttnn.execute_trace(model.device, trace, cq_id=0, blocking=True)
        rows = model.fetch(logits)
        for user, each in enumerate(found):
            each.append(int(rows[user].argmax()))
    if trace is not None:
        ttnn.release_trace(model.device, trace)
    return found


def open_mesh():
    """The chips this file is for."""
    if MESH != (1, 1):
        ttnn.set_fabric_config(FABRIC)
    return ttnn.open_mesh_device(ttnn.MeshShape(*MESH), trace_region_size=TRACE_BYTES)


def refusal() -> str:
    """Why this file cannot run here, if it cannot."""
    try:
        found = version("ttnn")
    except PackageNotFoundError:
        found = "of unknown version"
    if not found.startswith(f"{TTNN}."):
        return f"ttnn {found}; this file calls ttnn {TTNN}"
    wanted = MESH[0] * MESH[1]
    try:
        chips = ttnn.get_num_devices()
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        return f"no Tenstorrent chips found ({said}); this file needs {wanted}"
    return "" if chips >= wanted else f"{chips} Tenstorrent chips; this file needs {wanted}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-on-device", action="store_true", help="run on the board")
    parser.add_argument("--weights", type=Path, default=Path(__file__).parent, metavar="DIR")
    parser.add_argument("--tokens", action="append", metavar="IDS", help="a prompt as token ids")
    parser.add_argument("--prompt", action="append", help="one as text (wants tokenizers)")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--no-trace", action="store_true", help="send every operator every step")
    args = parser.parse_args()
    if not args.run_on_device:
        print("nothing was run; --run-on-device runs this file on a board", file=sys.stderr)
        return 2
    reason = refusal()
    if reason:
        print(reason, file=sys.stderr)
        return 2
    tokenizer = None
    if args.prompt:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(args.weights / "tokenizer" / "tokenizer.json"))
    prompts = [[int(each) for each in text.split()] for text in args.tokens or []]
    prompts += [tokenizer.encode(text).ids for text in args.prompt or []]
    if not 1 <= len(prompts) <= BATCH:
        print(f"{len(prompts)} prompts; allowed: 1 to {BATCH}", file=sys.stderr)
        return 2
    mesh_device = open_mesh()
    try:
        model = Model(mesh_device, convert_weights(args.weights, mesh_device))
        found = generate(model, prompts, args.max_new_tokens, traced=not args.no_trace)
        for prompt, each in zip(prompts, found, strict=True):
            if tokenizer is None:
                print(" ".join(map(str, each)))
                continue
            # The answer continues the prompt: decoded on its own, it may lose its first space.
            print(tokenizer.decode([*prompt, *each])[len(tokenizer.decode(prompt)) :])
    finally:
        ttnn.close_mesh_device(mesh_device)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
'''
