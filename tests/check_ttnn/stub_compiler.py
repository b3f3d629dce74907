"""Takes the place of SFPI's RISC-V compiler where kernels are built but never run.

Compiling leaves an empty object, linking a tiny program that returns at once: enough for ttnn's
loader, which wants code, data, a symbol table and relocations.
"""

import struct
import sys

CODE_AT, DATA_AT = 0x8000, 0xFFB00800
NOP, RETURN = 0x00000013, 0x00008067
RISCV, EXECUTABLE = 243, 2
PROGBITS, SYMTAB, STRTAB, RELA = 1, 2, 3, 4
WRITE, ALLOC, EXEC, INFO_LINK = 1, 2, 4, 0x40


def executable() -> bytes:
    """A 32-bit little-endian RISC-V ELF with one code and one data segment."""
    names = ["", ".text", ".rela.text", ".data", ".symtab", ".strtab", ".shstrtab"]
    table = b"".join(name.encode() + b"\0" for name in names)
    code = struct.pack("<4I", NOP, NOP, NOP, RETURN)
    data = bytes(4)
    parts = [
        # name, type, flags, address, content, link, info, entry size
        ("", 0, 0, 0, b"", 0, 0, 0),
        (".text", PROGBITS, ALLOC | EXEC, CODE_AT, code, 0, 0, 0),
        (".rela.text", RELA, INFO_LINK, 0, b"", 4, 1, 12),
        (".data", PROGBITS, ALLOC | WRITE, DATA_AT, data, 0, 0, 0),
        (".symtab", SYMTAB, 0, 0, bytes(16), 5, 1, 16),
        (".strtab", STRTAB, 0, 0, b"\0", 0, 0, 0),
        (".shstrtab", STRTAB, 0, 0, table, 0, 0, 0),
    ]
    start = 52 + 2 * 32
    body, headers, places = b"", b"", {}
    for name, kind, flags, address, content, link, info, size in parts:
        body += bytes(-len(body) % 4)
        places[name] = start + len(body)
        headers += struct.pack(
            "<10I",
            *(table.index(name.encode() + b"\0") if name else 0, kind, flags, address),
            *(places[name] if kind else 0, len(content), link, info, 4 if kind else 0, size),
        )
        body += content
    body += bytes(-len(body) % 4)
    identity = b"\x7fELF\1\1\1" + bytes(9)
    at = start + len(body)
    head = struct.pack(
        *("<HHIIIIIHHHHHH", EXECUTABLE, RISCV, 1, CODE_AT, 52, at, 0),
        *(52, 32, 2, 40, len(parts), len(parts) - 1),
    )
    segments = b"".join(
        struct.pack("<8I", 1, places[name], address, loaded, len(part), len(part), flags, 4)
        for name, address, loaded, part, flags in (
            (".text", CODE_AT, CODE_AT, code, 5),
            (".data", DATA_AT, CODE_AT + len(code), data, 6),  # packed behind the code
        )
    )
    return identity + head + segments + body + headers


def main(arguments: list) -> int:
    if "--version" in arguments:
        print("riscv-tt-elf-g++ (a stand-in) 15.1.0")
        return 0
    if "-x" in arguments or "-o" not in arguments:
        return 1  # no precompiled headers
    out = arguments[arguments.index("-o") + 1]
    if "-MF" in arguments:
        with open(arguments[arguments.index("-MF") + 1], "w") as dependencies:
            dependencies.write(f"{out}:\n")
    with open(out, "wb") as written:
        written.write(b"" if "-c" in arguments else executable())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
