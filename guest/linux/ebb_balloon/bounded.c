// SPDX-License-Identifier: GPL-2.0-only
/*
 * Module parameters that are bounded numbers.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/compiler.h>
#include <linux/kernel.h>
#include <linux/printk.h>
#include <linux/sysfs.h>

#include "bounded.h"

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

const struct kernel_param_ops ebb_bounded_ops = { .set = ebb_bounded_set, .get = ebb_bounded_get };
