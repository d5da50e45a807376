"""Predict the needs, actions and costs of a training, before anything is allocated."""

from infinity.planner.decoder import WIDTH_STEP, Shape, decoder_of, shape_of
from infinity.planner.filled import filled_later, states_on_device
from infinity.planner.memory import Estimate, estimate, host_problem, largest_model, plan_with_room, problems
from infinity.planner.rates import Duplex, Rates, rates_of, with_numbers
from infinity.planner.step_time import StepTime, predict_step
from infinity.planner.sweep import Point, Sweep
from infinity.planner.training_plan import Machine, TrainingPlan, plan_training
from infinity.planner.work import Work, count_work
from infinity.zero.budgets import Drive, drives_here, free_on

__all__ = [
    "WIDTH_STEP",
    "Drive",
    "Duplex",
    "Estimate",
    "Machine",
    "Point",
    "Rates",
    "Shape",
    "StepTime",
    "Sweep",
    "TrainingPlan",
    "Work",
    "count_work",
    "decoder_of",
    "drives_here",
    "estimate",
    "filled_later",
    "free_on",
    "host_problem",
    "largest_model",
    "plan_training",
    "plan_with_room",
    "predict_step",
    "problems",
    "rates_of",
    "shape_of",
    "states_on_device",
    "with_numbers",
]
