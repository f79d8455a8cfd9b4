/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Module parameters that are bounded numbers. Unlike param_set_uint_minmax(),
 * these log which values are valid.
 */
#ifndef EBB_BALLOON_BOUNDED_H
#define EBB_BALLOON_BOUNDED_H

#include <linux/compiler.h>
#include <linux/kernel.h>
#include <linux/moduleparam.h>
#include <linux/printk.h>
#include <linux/sysfs.h>

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

static int ebb_bounded_set(const char *text, const struct kernel_param *param)
{
	const struct ebb_bounded *bounded = param->arg;
	unsigned int number;

	if (kstrtouint(text, 0, &number) || number < bounded->least || number > bounded->most) {
		pr_err("%s=%s: legal values are %u to %u\n", param->name, text, bounded->least,
		       bounded->most);
		return -EINVAL;
	}
	WRITE_ONCE(*bounded->value, number);
	return 0;
}

static int ebb_bounded_get(char *text, const struct kernel_param *param)
{
	const struct ebb_bounded *bounded = param->arg;

	return sysfs_emit(text, "%u\n", READ_ONCE(*bounded->value));
}

static const struct kernel_param_ops ebb_bounded_ops = {
	.set = ebb_bounded_set,
	.get = ebb_bounded_get,
};

/* Makes a variable a parameter. Other values are refused and the valid ones are logged. */
#define ebb_bounded_param(name, variable, lowest, highest, mode)		\
	static const struct ebb_bounded name##_bounded = {			\
		.value = &(variable), .least = (lowest), .most = (highest)	\
	};									\
	module_param_cb(name, &ebb_bounded_ops, (void *)&name##_bounded, mode)

#endif
