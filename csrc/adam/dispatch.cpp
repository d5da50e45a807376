#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace infinity::adam {
namespace {

std::vector<const Kernels*> runnable() {
    std::vector<const Kernels*> sets = {&baseline::kernels};
#ifdef INFINITY_X86_SETS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        sets.push_back(&avx2::kernels);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        sets.push_back(&avx512::kernels);
#endif
    return sets;
}

const Kernels& find(const std::string& name) {
    std::string known;
    for (const Kernels* set : runnable()) {
        if (name == set->name)
            return *set;
        known += (known.empty() ? "" : ", ") + std::string(set->name);
    }
    throw std::invalid_argument("instruction set '" + name +
                                "' cannot run here; this machine and build have: " + known);
}

std::atomic<const Kernels*> active{nullptr};

} // namespace

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const Kernels* set : runnable())
        names.emplace_back(set->name);
    return names;
}

const Kernels& active_kernels() {
    const Kernels* set = active.load(std::memory_order_acquire);
    if (set == nullptr) {
        const char* wanted = std::getenv("INFINITY_ISA");
        set = wanted != nullptr && *wanted != '\0' ? &find(wanted) : runnable().back();
        active.store(set, std::memory_order_release);
    }
    return *set;
}

void use_instruction_set(const std::string& name) {
    active.store(&find(name), std::memory_order_release);
}

} // namespace infinity::adam
