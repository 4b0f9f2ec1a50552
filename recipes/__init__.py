"""Recipes as package data, so that `medusa-train quickstart` finds its own wherever it is installed."""
