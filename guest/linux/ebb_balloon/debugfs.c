// SPDX-License-Identifier: GPL-2.0-only
/*
 * /sys/kernel/debug/ebb_balloon/counters: all counters, as lines of "name value".
 *
 * Writing anything to the file sets longest_lock_ns, a maximum, to 0. Of counts
 * and sums, differences can be taken.
 */
#include <linux/debugfs.h>
#include <linux/err.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/seq_file.h>

#include "ebb_balloon.h"
#include "tracker.h"

static int ebb_counters_show(struct seq_file *m, void *unused)
{
	ebb_balloon_show(m->private, m);
	ebb_trackers_show(m->private, m);
	return 0;
}

static int ebb_counters_open(struct inode *inode, struct file *file)
{
	return single_open(file, ebb_counters_show, inode->i_private);
}

static ssize_t ebb_counters_write(struct file *file, const char __user *text, size_t length,
				  loff_t *offset)
{
	struct seq_file *m = file->private_data;
	struct ebb_balloon *eb = m->private;

	atomic64_set(&eb->counters[EBB_LONGEST_LOCK_NS], 0);
	return length;
}

static const struct file_operations ebb_counters_fops = {
	.owner = THIS_MODULE,
	.open = ebb_counters_open,
	.read = seq_read,
	.write = ebb_counters_write,
	.llseek = seq_lseek,
	.release = single_release,
};

struct dentry *ebb_debugfs_add(struct ebb_balloon *eb)
{
	struct dentry *dir = debugfs_create_dir(KBUILD_MODNAME, NULL);

	if (!IS_ERR(dir))
		debugfs_create_file("counters", 0600, dir, eb, &ebb_counters_fops);
	return dir;
}

void ebb_debugfs_remove(struct dentry *dir)
{
	debugfs_remove(dir);
}
