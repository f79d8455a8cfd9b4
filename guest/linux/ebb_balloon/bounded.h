/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Module parameters that are numbers within bounds.
 */
#ifndef EBB_BALLOON_BOUNDED_H
#define EBB_BALLOON_BOUNDED_H

#include <linux/moduleparam.h>

/**
 * struct ebb_bounded - a number and its bounds
 * @value: where it is kept
 * @least: smallest legal value
 * @most: largest legal value
 */
struct ebb_bounded {
	unsigned int *value;
	unsigned int least;
	unsigned int most;
};

extern const struct kernel_param_ops ebb_bounded_ops;

/* Makes a variable a parameter; other values are refused by a line that names the legal ones. */
#define ebb_bounded_param(name, variable, lowest, highest, mode)		\
	static const struct ebb_bounded name##_bounded = {			\
		.value = &(variable), .least = (lowest), .most = (highest)	\
	};									\
	module_param_cb(name, &ebb_bounded_ops, (void *)&name##_bounded, mode)

#endif
