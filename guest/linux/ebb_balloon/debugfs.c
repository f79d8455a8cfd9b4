// SPDX-License-Identifier: GPL-2.0-only
/*
 * /sys/kernel/debug/ebb_balloon/counters: all counters, as lines of "name value".
 *
 * Writing anything to the file sets longest_lock_ns, a maximum, to 0. Of counts
 * and sums, differences can be taken.
 *
 * /sys/kernel/debug/ebb_balloon/recording: writing a number begins a recording of
 * so many events, 0 ends it; reading gives the last one that has ended, in the
 * format of README.md.
 */
#include <linux/debugfs.h>
#include <linux/err.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/seq_file.h>

#include "ebb_balloon.h"
#include "record.h"
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

static int ebb_recording_open(struct inode *inode, struct file *file)
{
	struct ebb_recording_reader *reader;

	reader = __seq_open_private(file, &ebb_recording_seq_ops, sizeof(*reader));
	if (!reader)
		return -ENOMEM;
	reader->generation = ebb_recording_generation();
	return 0;
}

static ssize_t ebb_recording_write(struct file *file, const char __user *text, size_t length,
				   loff_t *offset)
{
	struct ebb_balloon *eb = file_inode(file)->i_private;
	unsigned int events;
	int err;

	err = kstrtouint_from_user(text, length, 0, &events);
	if (err)
		return err;
	if (events > EBB_RECORDING_MAX)
		return -EINVAL;
	err = ebb_trackers_record(eb, events);
	return err ?: length;
}

static const struct file_operations ebb_recording_fops = {
	.owner = THIS_MODULE,
	.open = ebb_recording_open,
	.read = seq_read,
	.write = ebb_recording_write,
	.llseek = seq_lseek,
	.release = seq_release_private,
};

struct dentry *ebb_debugfs_add(struct ebb_balloon *eb)
{
	struct dentry *dir = debugfs_create_dir(KBUILD_MODNAME, NULL);

	if (!IS_ERR(dir)) {
		debugfs_create_file("counters", 0600, dir, eb, &ebb_counters_fops);
		debugfs_create_file("recording", 0600, dir, eb, &ebb_recording_fops);
	}
	return dir;
}

void ebb_debugfs_remove(struct dentry *dir)
{
	debugfs_remove(dir);
}
