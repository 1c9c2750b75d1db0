"""A study of two rules at two rates, as the first lines of its file."""

__all__ = ["RATES"]

RATES = """
title: Rates
configs: [quickstart]
axes:
  rule: {FedAvg: {}, GMA: {configs: [aggregator/gma]}}
  rate: {option: model.optimizer.lr, values: [0.01, 0.1]}
seeds: [0, 1]
"""
