// Chooses the instruction set of the kernels: the widest one that this machine has, or a named one.
#pragma once

#include "kernels.h"

#include <string>
#include <vector>

namespace infinity::adam {

// Returns the sets that this build has and this machine can run, narrowest first.
std::vector<std::string> instruction_sets();

// Returns the kernels in use. The first call chooses the set that the environment variable INFINITY_ISA names,
// otherwise the widest one. Throws std::invalid_argument if the named set cannot run.
const Kernels& active_kernels();

// Uses the named set from now on.
void use_instruction_set(const std::string& name);

} // namespace infinity::adam
