// A stress of the optimizer's kernels for the sanitizers: every rule, way of keeping parameter and moments, gradient
// dtype and instruction set, over buffers without a byte to spare, and several threads that share the pool. All
// instruction sets and thread counts must give the same bytes. Usage: adam_stress
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "dispatch.h"
#include "pool.h"
#include "run.h"

using namespace infinity::adam;

namespace {

using Bytes = std::vector<unsigned char>;

void check(bool right, const char* what) {
    if (!right) {
        std::fprintf(stderr, "FAILED: %s\n", what);
        std::exit(1);
    }
}

// The same numbers on every run and machine.
class Numbers {
  public:
    explicit Numbers(uint64_t seed) : state_(seed) {}

    uint32_t bits() {
        state_ = state_ * 6364136223846793005U + 1442695040888963407U;
        return static_cast<uint32_t>(state_ >> 32U);
    }

    // About 0, mostly small: of the size of weights and gradients.
    float small() { return (static_cast<float>(bits()) / 2147483648.0F - 1.0F) * 0.1F; }

  private:
    uint64_t state_;
};

size_t size_of(Dtype dtype) {
    return dtype == Dtype::f32 ? 4 : 2;
}

void put(Bytes& bytes, size_t index, Dtype dtype, float value) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    if (dtype == Dtype::f32) {
        std::memcpy(bytes.data() + 4 * index, &bits, 4);
        return;
    }
    // bf16 by cutting off; for fp16, a number of that range will do.
    const auto half = static_cast<uint16_t>(dtype == Dtype::bf16 ? bits >> 16U : 0x1000U | (bits >> 20U & 0x3ffU));
    std::memcpy(bytes.data() + 2 * index, &half, 2);
}

Bytes values(Numbers& numbers, size_t n, Dtype dtype) {
    Bytes bytes(n * size_of(dtype));
    for (size_t i = 0; i < n; ++i) {
        put(bytes, i, dtype, numbers.small());
    }
    return bytes;
}

struct Case {
    Rule rule;
    ParamKind param;
    MomentKind moment;
    Dtype grad;
    size_t n;
};

// Everything that one case reads and writes; each field is exactly as long as the kernels may touch.
struct Fields {
    Bytes param, master, first, second, grad;
    std::vector<float> first_scales, second_scales;

    explicit Fields(const Case& c) {
        Numbers numbers(c.n * 31 + static_cast<size_t>(c.rule));
        const Dtype dtype = c.param == ParamKind::f32     ? Dtype::f32
                            : c.param == ParamKind::split ? Dtype::bf16
                                                          : Dtype::f16;
        param = values(numbers, c.n, dtype);
        master = c.param == ParamKind::split ? Bytes(2 * c.n) : values(numbers, c.n, Dtype::f32);
        const size_t width = c.moment == MomentKind::f32 ? 4 : c.moment == MomentKind::bf16 ? 2 : 1;
        first.resize(width * c.n);
        second.resize(width * c.n);
        first_scales.resize((c.n + kScaleBlock - 1) / kScaleBlock);
        second_scales.resize(first_scales.size());
        grad = values(numbers, c.n, c.grad);
    }

    void update(const Case& c, uint64_t step) {
        UpdateArgs args{};
        args.rule = c.rule;
        args.param_kind = c.param;
        args.moment_kind = c.moment;
        args.grad_dtype = c.grad;
        args.param = param.data();
        args.master = c.param == ParamKind::f32 ? nullptr : master.data();
        args.first = {c.rule == Rule::adagrad ? nullptr : first.data(), first_scales.data()};
        args.second = {c.rule == Rule::lion || c.rule == Rule::sgd ? nullptr : second.data(), second_scales.data()};
        args.grad = grad.data();
        args.scalars = {1.0F, 0.999F, 0.01F, -1e-2F, 0.9F, 0.1F, 0.99F, 0.01F, 0.1F, 1.5F, 1e-8F};
        args.seed = step;
        run_update(args, c.n);
    }

    bool operator==(const Fields& other) const {
        return param == other.param && master == other.master && first == other.first && second == other.second &&
               first_scales == other.first_scales && second_scales == other.second_scales;
    }
};

std::vector<Case> cases() {
    const std::vector<size_t> lengths = {1, 15, 17, 127, 129, 255, 257, 1023, 3 * kChunk + 77};
    std::vector<Case> all;
    for (const auto rule : {Rule::adamw, Rule::adam, Rule::adagrad, Rule::lion, Rule::sgd}) {
        for (const auto param : {ParamKind::f32, ParamKind::split, ParamKind::master}) {
            for (const auto moment : {MomentKind::f32, MomentKind::bf16, MomentKind::int8}) {
                for (const auto grad : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
                    const size_t n = lengths[all.size() % lengths.size()];
                    all.push_back({rule, param, moment, grad, n});
                    all.push_back({rule, param, moment, grad, 300});
                }
            }
        }
    }
    return all;
}

Fields trained(const Case& c) {
    Fields fields(c);
    for (uint64_t step = 1; step <= 3; ++step) {
        fields.update(c, step);
    }
    return fields;
}

void same_on_every_set() {
    const std::vector<std::string> sets = instruction_sets();
    for (const Case& c : cases()) {
        use_instruction_set(sets.front());
        set_thread_count(1);
        const Fields expected = trained(c);
        for (const std::string& set : sets) {
            use_instruction_set(set);
            for (const int threads : {1, 3}) {
                set_thread_count(threads);
                check(trained(c) == expected, (set + " gives other bytes").c_str());
            }
        }
    }
}

void several_callers() {
    use_instruction_set(instruction_sets().back());
    set_thread_count(3);
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller) {
        callers.emplace_back([caller] {
            const auto rule = caller == 1 ? Rule::lion : Rule::adamw;
            const Case c{rule, ParamKind::split, MomentKind::int8, Dtype::bf16, 2 * kChunk + 100};
            const Fields expected = trained(c);
            for (int round = 0; round < 10; ++round) {
                check(trained(c) == expected, "callers disturb one another");
            }
        });
    }
    for (std::thread& caller : callers) {
        caller.join();
    }
}

void gradients() {
    for (const std::string& set : instruction_sets()) {
        use_instruction_set(set);
        for (const auto from : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
            for (const auto to : {Dtype::f32, from}) {
                for (const size_t n : {size_t{1}, size_t{31}, size_t{300}, kChunk + 5}) {
                    Numbers numbers(n);
                    const Bytes source = values(numbers, n, from);
                    Bytes target(n * size_of(to));
                    for (const bool accumulate : {false, true}) {
                        const GradStats stats =
                            run_grad_store({target.data(), to, source.data(), from, accumulate, 0.5F}, n);
                        check(stats.finite && stats.sum_sq > 0, "the sum of squares");
                    }
                }
            }
        }
    }
}

} // namespace

int main() {
    same_on_every_set();
    several_callers();
    gradients();
    std::printf("ok:");
    for (const std::string& set : instruction_sets()) {
        std::printf(" %s", set.c_str());
    }
    std::printf("\n");
}
