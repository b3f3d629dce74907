// Building blocks for program checks.
#pragma once

#include <stdexcept>
#include <string>

#include "panels.h"

namespace tw {

struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline void require(bool holds, const std::string& what) {
    if (!holds) throw Refused(what);
}

inline bool is_between(int64_t value, int64_t least, int64_t end) { return value >= least && value < end; }

constexpr int32_t kMost = 1 << 24;  // rows, columns, widths and positions

struct Checked {
    const TwProgram& program;
    std::string where;

    void holds(bool value, const char* what) const { require(value, where + ": " + what); }

    void place(const TwPlace& place, const char* name) const {
        holds(is_between(place.buffer, 0, program.num_buffers), name);
        holds(place.first >= 0 && place.width > 0 && place.width <= kMost, name);
        holds((int64_t)place.first + place.width <= program.widths[place.buffer], name);
    }

    const TwTensor& tensor(int32_t index, const char* name) const {
        holds(is_between(index, 0, program.num_tensors), name);
        return program.tensors[index];
    }

    void vector(int32_t index, int64_t count, const char* name) const {
        const TwTensor& found = tensor(index, name);
        holds(found.kind == TW_VECTOR && found.rows == count, name);
    }

    const TwTensor& panels(int32_t index, int64_t rows, int64_t columns, bool paired) const {
        const TwTensor& found = tensor(index, "weight");
        holds(found.kind != TW_VECTOR && found.rows == rows && found.columns == columns, "weight");
        uint64_t wanted = num_panels(rows, paired) * panel_size(found.kind, columns).total;
        holds(found.num_bytes == wanted, "bytes of its weight");
        return found;
    }

    // For both phases, with a weight of this kind.
    void arithmetics(const TwInstruction& each, int32_t kind) const {
        for (int32_t arithmetic : each.arithmetic) {
            holds(is_between(arithmetic, 0, TW_NUM_ARITHMETICS), "arithmetic");
            holds(has_arithmetic(kind, arithmetic), "arithmetic of its weight");
        }
    }

    const TwState& state(int32_t index, int32_t kind) const {
        holds(is_between(index, 0, program.num_states) && program.states[index].kind == kind, "state");
        return program.states[index];
    }
};

constexpr int32_t kMostChosen = 64;  // experts per token

// Experts per token after a Route.
struct Routed {
    int32_t num_experts = 0, top_k = 0;  // 0: none
};

void check_mixer(const Checked& checked, const TwInstruction& each, Routed& routed);
void check_program(const TwProgram& program);

}  // namespace tw
