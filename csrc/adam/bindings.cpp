// infinity._adam: buffers come as addresses, sizes and dtype codes; infinity/kernels checks them first.
#include "dispatch.h"
#include "pool.h"
#include "run.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;
using namespace infinity::adam;

namespace {

template <class T> T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// The lost elements of an update: positions of gradients, unless there are too many; positions and bits of parameters.
using LostParts = std::tuple<std::optional<std::vector<uint32_t>>, std::vector<uint32_t>, std::vector<uint16_t>>;

} // namespace

PYBIND11_MODULE(_adam, m) {
    m.doc() = "Optimizer kernels of infinity; use them through infinity.kernels, which checks the arguments.";

    py::enum_<Dtype>(m, "Dtype").value("f32", Dtype::f32).value("bf16", Dtype::bf16).value("f16", Dtype::f16);
    py::enum_<Rule>(m, "Rule")
        .value("adamw", Rule::adamw)
        .value("adam", Rule::adam)
        .value("adagrad", Rule::adagrad)
        .value("lion", Rule::lion)
        .value("sgd", Rule::sgd);
    py::enum_<ParamKind>(m, "ParamKind")
        .value("f32", ParamKind::f32)
        .value("split", ParamKind::split)
        .value("master", ParamKind::master);
    py::enum_<MomentKind>(m, "MomentKind")
        .value("f32", MomentKind::f32)
        .value("bf16", MomentKind::bf16)
        .value("int8", MomentKind::int8);
    py::class_<Scalars>(m, "Scalars")
        .def(py::init([](float grad_scale, float param_factor, float l2, float step_size, float m_factor,
                         float m_weight, float v_factor, float v_weight, float blend, float inv_bias2, float eps) {
                 return Scalars{grad_scale, param_factor, l2,    step_size, m_factor, m_weight,
                                v_factor,   v_weight,     blend, inv_bias2, eps};
             }),
             py::kw_only(), py::arg("grad_scale"), py::arg("param_factor") = 1.0f, py::arg("l2") = 0.0f,
             py::arg("step_size"), py::arg("m_factor") = 0.0f, py::arg("m_weight") = 0.0f, py::arg("v_factor") = 0.0f,
             py::arg("v_weight") = 0.0f, py::arg("blend") = 0.0f, py::arg("inv_bias2") = 1.0f, py::arg("eps") = 0.0f);
    py::class_<Aside>(m, "Aside")
        .def(py::init([](uintptr_t param, uintptr_t master, uintptr_t first, uintptr_t first_scales, uintptr_t second,
                         uintptr_t second_scales) {
                 return Aside{at<void>(param),
                              at<void>(master),
                              {at<void>(first), at<float>(first_scales)},
                              {at<void>(second), at<float>(second_scales)}};
             }),
             py::kw_only(), py::arg("param"), py::arg("master"), py::arg("first"), py::arg("first_scales"),
             py::arg("second"), py::arg("second_scales"));
    m.attr("SCALE_BLOCK") = kScaleBlock;

    const auto no_gil = py::call_guard<py::gil_scoped_release>();
    m.def(
        "update",
        [](Rule rule, ParamKind param_kind, MomentKind moment_kind, size_t n, uintptr_t param, uintptr_t master,
           uintptr_t first, uintptr_t first_scales, uintptr_t second, uintptr_t second_scales, uintptr_t grad,
           Dtype grad_dtype, const Scalars& scalars, uint64_t seed, uint64_t index, const Aside* aside,
           bool report_lost, bool params) -> std::optional<LostParts> {
            UpdateArgs args;
            args.rule = rule;
            args.param_kind = param_kind;
            args.moment_kind = moment_kind;
            args.grad_dtype = grad_dtype;
            args.param = at<void>(param);
            args.master = at<void>(master);
            args.first = {at<void>(first), at<float>(first_scales)};
            args.second = {at<void>(second), at<float>(second_scales)};
            args.grad = at<void>(grad);
            args.scalars = scalars;
            args.seed = seed;
            args.index = index;
            args.aside = aside == nullptr ? Aside{} : *aside;
            if (report_lost) {
                LostOfUpdate lost = run_update_reporting_lost(args, n, params);
                return LostParts(std::move(lost.grads), std::move(lost.params), std::move(lost.param_bits));
            }
            run_update(args, n);
            return std::nullopt;
        },
        py::kw_only(), py::arg("rule"), py::arg("param_kind"), py::arg("moment_kind"), py::arg("n"), py::arg("param"),
        py::arg("master") = 0, py::arg("first") = 0, py::arg("first_scales") = 0, py::arg("second") = 0,
        py::arg("second_scales") = 0, py::arg("grad"), py::arg("grad_dtype"), py::arg("scalars"), py::arg("seed") = 0,
        py::arg("index") = 0, py::arg("aside") = nullptr, py::arg("report_lost") = false, py::arg("params") = false,
        no_gil);
    m.def(
        "reconstruct_grads",
        [](size_t n, uintptr_t before, uintptr_t after, const Scalars& scalars, Dtype dtype, uintptr_t grad) {
            run_reconstruct_grads(at<float>(before), at<float>(after), scalars, dtype, at<void>(grad), n);
        },
        no_gil);
    m.def(
        "reconstruct_params",
        [](size_t n, uintptr_t param, uintptr_t low_before, uintptr_t low_after, uintptr_t first, uintptr_t second,
           const Scalars& scalars) {
            run_reconstruct_params(at<uint16_t>(param), at<int16_t>(low_before), at<int16_t>(low_after),
                                   at<float>(first), at<float>(second), scalars, n);
        },
        no_gil);
    m.def(
        "load_moment",
        [](MomentKind kind, bool is_signed, size_t n, uintptr_t values, uintptr_t scales, uintptr_t out) {
            run_load_moment(kind, is_signed, {at<void>(values), at<float>(scales)}, at<float>(out), n);
        },
        no_gil);
    m.def(
        "store_moment",
        [](MomentKind kind, bool is_signed, size_t n, uintptr_t values, uintptr_t scales, uintptr_t source,
           uint64_t seed, uint64_t index) {
            run_store_moment(kind, is_signed, {at<void>(values), at<float>(scales)}, at<float>(source), n, seed, index);
        },
        no_gil);
    m.def(
        "grad_store",
        [](size_t n, uintptr_t dst, Dtype dst_dtype, uintptr_t src, Dtype src_dtype, bool accumulate, float scale) {
            const GradStats stats =
                run_grad_store({at<void>(dst), dst_dtype, at<void>(src), src_dtype, accumulate, scale}, n);
            return std::pair<double, bool>(stats.sum_sq, stats.finite);
        },
        no_gil);
    m.def(
        "split_master",
        [](size_t n, uintptr_t master, uintptr_t param, uintptr_t low_bits) {
            run_split(at<float>(master), at<uint16_t>(param), at<int16_t>(low_bits), n);
        },
        no_gil);
    m.def(
        "join_master",
        [](size_t n, uintptr_t param, uintptr_t low_bits, uintptr_t master) {
            run_join(at<uint16_t>(param), at<int16_t>(low_bits), at<float>(master), n);
        },
        no_gil);
    m.def(
        "bare_loop",
        [](size_t n, uintptr_t param, uintptr_t exp_avg, uintptr_t exp_avg_sq, uintptr_t grad) {
            run_bare(at<float>(param), at<float>(exp_avg), at<float>(exp_avg_sq), at<float>(grad), n);
        },
        no_gil);

    m.def("instruction_sets", &instruction_sets);
    m.def("active_instruction_set", [] { return std::string(active_kernels().name); });
    m.def("use_instruction_set", &use_instruction_set);
    m.def("thread_count", &thread_count);
    m.def("set_thread_count", &set_thread_count);
    m.def("cpus", &cpus);
    m.def("set_cpus", &set_cpus);
}
