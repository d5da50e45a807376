// Which instruction set's kernels run: the widest that this machine has, or the one that was asked for.
#pragma once

#include "kernels.h"

#include <string>
#include <vector>

namespace infinity::adam {

// The sets that this build has and this machine can run, narrowest first.
std::vector<std::string> instruction_sets();

// The kernels in use. The first call chooses: the set named by the environment variable INFINITY_ISA, else the widest.
// Throws std::invalid_argument if the named one cannot run.
const Kernels& active_kernels();

// Uses the named set from now on.
void use_instruction_set(const std::string& name);

} // namespace infinity::adam
