// SPDX-License-Identifier: GPL-2.0-only
/*
 * /sys/kernel/debug/ebb_balloon/counters: all counters, as lines of "name value".
 */
#include <linux/debugfs.h>
#include <linux/err.h>
#include <linux/module.h>
#include <linux/seq_file.h>

#include "tracker.h"

static int ebb_counters_show(struct seq_file *m, void *unused)
{
	ebb_balloon_show(m->private, m);
	ebb_trackers_show(m->private, m);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(ebb_counters);

struct dentry *ebb_debugfs_add(struct ebb_balloon *eb)
{
	struct dentry *dir = debugfs_create_dir(KBUILD_MODNAME, NULL);

	if (!IS_ERR(dir))
		debugfs_create_file("counters", 0400, dir, eb, &ebb_counters_fops);
	return dir;
}

void ebb_debugfs_remove(struct dentry *dir)
{
	debugfs_remove(dir);
}
