// SPDX-License-Identifier: GPL-2.0-only
/*
 * /sys/kernel/debug/ebb_trackers/recording: writing a number begins a recording of
 * so many events, 0 ends it; reading gives the last one that has ended, in the
 * format of README.md.
 */
#include <linux/debugfs.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/seq_file.h>

#include "record.h"

static struct dentry *ebb_recording_directory;

static int ebb_recording_open(struct inode *inode, struct file *file)
{
	struct ebb_recording_reader *reader;

	reader = __seq_open_private(file, &ebb_recording_seq_ops, sizeof(*reader));
	if (!reader)
		return -ENOMEM;
	reader->generation = ebb_recording_generation();
	return 0;
}

/*
 * The tracker that runs is stopped before and started again afterwards: a
 * recording begins without any state of a tracker, and nothing is isolated for
 * one at either end of it.
 */
static int ebb_recording_replace(unsigned int events)
{
	ebb_recording_end();
	return events ? ebb_recording_begin(events) : 0;
}

static ssize_t ebb_recording_write(struct file *file, const char __user *text, size_t length,
				   loff_t *offset)
{
	unsigned int events;
	int err;

	err = kstrtouint_from_user(text, length, 0, &events);
	if (err)
		return err;
	if (events > EBB_RECORDING_MAX)
		return -EINVAL;
	err = ebb_trackers_restart(ebb_recording_replace, events);
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

void ebb_recording_file_add(void)
{
	ebb_recording_directory = debugfs_create_dir(KBUILD_MODNAME, NULL);
	debugfs_create_file("recording", 0600, ebb_recording_directory, NULL,
			    &ebb_recording_fops);
}

void ebb_recording_file_remove(void)
{
	debugfs_remove(ebb_recording_directory);
}
