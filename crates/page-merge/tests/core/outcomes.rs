//! outcomes
