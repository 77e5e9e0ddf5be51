"""Generated from proto/specdraft/v1 by `make proto`. DO NOT EDIT."""
