/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Module parameters that are bounded numbers.
 */
#ifndef EBB_BALLOON_BOUNDED_H
#define EBB_BALLOON_BOUNDED_H

#include <linux/moduleparam.h>

/**
 * struct ebb_bounded - a number and its bounds
 * @value: the variable
 * @least: smallest valid value
 * @most: largest valid value
 */
struct ebb_bounded {
	unsigned int *value;
	unsigned int least;
	unsigned int most;
};

extern const struct kernel_param_ops ebb_bounded_ops;

/* Makes a variable a parameter. Other values are refused and the valid ones are logged. */
#define ebb_bounded_param(name, variable, lowest, highest, mode)		\
	static const struct ebb_bounded name##_bounded = {			\
		.value = &(variable), .least = (lowest), .most = (highest)	\
	};									\
	module_param_cb(name, &ebb_bounded_ops, (void *)&name##_bounded, mode)

#endif
