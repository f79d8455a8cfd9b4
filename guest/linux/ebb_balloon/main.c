// SPDX-License-Identifier: GPL-2.0-only
/*
 * ebb_balloon: a driver for the virtio memory balloon, with the extension that
 * docs/extension.md specifies and with trackers of free pages.
 *
 * Lock order: the page lock of a balloon page, then balloon_dev_info's
 * pages_lock; the device's lock, hinting's, the reports' and the requests' are
 * taken alone. All of them are taken in interrupts or during memory allocation,
 * so nothing is allocated under them.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/module.h>
#include <linux/poison.h>
#include <linux/seq_file.h>
#include <linux/slab.h>

#include "bounded.h"
#include "ebb_balloon.h"

/* 0: the shortest negotiated one. */
static u8 forced_encoding;
/* Encodings of the most recently started device, 0 without one. */
static u8 device_encodings;

static const char * const encoding_names[] = { "auto", "pfns", "bitmap", "ranges" };

static int encoding_set(const char *text, const struct kernel_param *param)
{
	int encoding = sysfs_match_string(encoding_names, text);
	u8 offered = READ_ONCE(device_encodings);

	if (encoding < 0) {
		pr_err("encoding=%s: legal values are auto, pfns, bitmap and ranges\n", text);
		return -EINVAL;
	}
	if (encoding && offered && !(offered & BIT(encoding))) {
		pr_err("encoding=%s: was not negotiated with the device\n",
		       encoding_names[encoding]);
		return -EOPNOTSUPP;
	}
	WRITE_ONCE(forced_encoding, encoding);
	return 0;
}

static int encoding_get(char *text, const struct kernel_param *param)
{
	return sysfs_emit(text, "%s\n", encoding_names[READ_ONCE(forced_encoding)]);
}

static const struct kernel_param_ops encoding_ops = { .set = encoding_set, .get = encoding_get };
module_param_cb(encoding, &encoding_ops, NULL, 0644);
MODULE_PARM_DESC(encoding,
		 "how messages name pages: auto (the shortest way, default), pfns, bitmap, ranges");

unsigned int ebb_max_order = EBB_LARGEST_ORDER;

ebb_bounded_param(max_order, ebb_max_order, 0, EBB_LARGEST_ORDER, 0644);
MODULE_PARM_DESC(max_order, "largest blocks of an inflation, as log2 of pages");

static const char * const counter_names[EBB_COUNTERS] = {
	[EBB_INFLATED_PAGES] = "inflated_pages",
	[EBB_DEFLATED_PAGES] = "deflated_pages",
	[EBB_OOM_PAGES] = "oom_pages",
	[EBB_MOVED_PAGES] = "moved_pages",
	[EBB_MESSAGES] = "messages",
	[EBB_MESSAGE_BYTES] = "message_bytes",
	[EBB_MESSAGES_BARE] = "messages_bare",
	[EBB_MESSAGES_PFNS] = "messages_pfns",
	[EBB_MESSAGES_BITMAP] = "messages_bitmap",
	[EBB_MESSAGES_RANGES] = "messages_ranges",
	[EBB_ALLOCATE_NS] = "allocate_ns",
	[EBB_SEND_NS] = "send_ns",
	[EBB_RELEASE_NS] = "release_ns",
	[EBB_SPLIT_BLOCKS] = "split_blocks",
	[EBB_REPORTS] = "reports",
	[EBB_REPORT_BLOCKS] = "report_blocks",
	[EBB_EARLY_PAGES] = "early_pages",
	[EBB_HINTED_BLOCKS] = "hinted_blocks",
	[EBB_REQUESTS] = "requests",
	[EBB_BAD_REQUESTS] = "bad_requests",
	[EBB_CANCELS] = "cancels",
	[EBB_ANSWERS_DONE] = "answers_done",
	[EBB_ANSWERS_ABORTED] = "answers_aborted",
	[EBB_ANSWERS_SUPERSEDED] = "answers_superseded",
	[EBB_ANSWER_MESSAGES] = "answer_messages",
	[EBB_ANSWER_BYTES] = "answer_bytes",
	[EBB_BLOCKS_NAMED] = "blocks_named",
	[EBB_PAGES_NAMED] = "pages_named",
	[EBB_WALK_NS] = "walk_ns",
	[EBB_LONGEST_LOCK_NS] = "longest_lock_ns",
	[EBB_LONGEST_LOCK_EVER_NS] = "longest_lock_ever_ns",
	[EBB_LOCKS] = "locks",
};

void ebb_balloon_show(struct ebb_balloon *eb, struct seq_file *m)
{
	u64 units, inflating, deflating;
	unsigned int i;

	spin_lock_irq(&eb->lock);
	units = eb->units;
	inflating = eb->inflating;
	deflating = eb->deflating;
	spin_unlock_irq(&eb->lock);
	seq_printf(m, "direct %d\n", eb->direct);
	seq_printf(m, "balloon_pages %llu\n", units >> EBB_UNIT_SHIFT);
	seq_printf(m, "inflating_pages %llu\n", inflating >> EBB_UNIT_SHIFT);
	seq_printf(m, "deflating_pages %llu\n", deflating >> EBB_UNIT_SHIFT);
	for (i = 0; i < EBB_COUNTERS; i++)
		seq_printf(m, "%s %lld\n", counter_names[i], atomic64_read(&eb->counters[i]));
	for (i = 0; i <= EBB_LARGEST_ORDER; i++)
		seq_printf(m, "order_%u %lld\n", i, atomic64_read(&eb->order_blocks[i]));
}

/**
 * ebb_encodings() - currently allowed encodings of a message
 * @eb: the device
 *
 * Return: bits of the encodings.
 */
u8 ebb_encodings(struct ebb_balloon *eb)
{
	u8 forced = READ_ONCE(forced_encoding);

	if (!eb->negotiated)
		return BIT(VIRTIO_BALLOON_ENC_PFNS);
	if (forced && eb->negotiated & BIT(forced))
		return BIT(forced);
	return eb->negotiated;
}

static int ebb_find_queues(struct ebb_balloon *eb)
{
	static const struct {
		const char *name;
		vq_callback_t *callback;
		int feature;
	} queues[EBB_VQS] = {
		[EBB_VQ_INFLATE] = { "inflate", ebb_messages_returned, -1 },
		[EBB_VQ_DEFLATE] = { "deflate", ebb_messages_returned, -1 },
		[EBB_VQ_STATS] = { "stats", ebb_stats_requested, VIRTIO_BALLOON_F_STATS_VQ },
		[EBB_VQ_FREE_PAGE] = { "free_page", ebb_hinting_returned,
				       VIRTIO_BALLOON_F_FREE_PAGE_HINT },
		[EBB_VQ_REPORTING] = { "reporting", ebb_report_returned,
				       VIRTIO_BALLOON_F_REPORTING },
		[EBB_VQ_HOST_REQUEST] = { "host_request", ebb_requests_returned,
					  VIRTIO_BALLOON_F_HOST_REQUEST_VQ },
	};
	unsigned int i;
#ifdef EBB_VIRTQUEUE_INFO
	struct virtqueue_info info[EBB_VQS] = {};

	for (i = 0; i < EBB_VQS; i++) {
		if (queues[i].feature >= 0 && !ebb_offers(eb, queues[i].feature))
			continue;
		info[i].name = queues[i].name;
		info[i].callback = queues[i].callback;
	}
	return virtio_find_vqs(eb->vdev, EBB_VQS, eb->vqs, info, NULL);
#else
	vq_callback_t *callbacks[EBB_VQS] = {};
	const char *names[EBB_VQS] = {};

	for (i = 0; i < EBB_VQS; i++) {
		if (queues[i].feature >= 0 && !ebb_offers(eb, queues[i].feature))
			continue;
		names[i] = queues[i].name;
		callbacks[i] = queues[i].callback;
	}
	return virtio_find_vqs(eb->vdev, EBB_VQS, eb->vqs, callbacks, names, NULL);
#endif
}

/* The host must know the content of free pages before it may discard any. */
static void ebb_tell_poison(struct ebb_balloon *eb)
{
	u32 value = 0;

	if (!ebb_offers(eb, VIRTIO_BALLOON_F_PAGE_POISON))
		return;
	if (!want_init_on_free())
		memset(&value, PAGE_POISON, sizeof(value));
	virtio_cwrite_le(eb->vdev, struct virtio_balloon_config, poison_val, &value);
}

/* Of a device that was reset. There may be none: after a restore that failed. */
static void ebb_drop_queues(struct ebb_balloon *eb)
{
	if (eb->vqs[EBB_VQ_INFLATE])
		eb->vdev->config->del_vqs(eb->vdev);
	memset(eb->vqs, 0, sizeof(eb->vqs));
}

/* Sets up queues and an empty balloon, for a new device or after a reset. */
static int ebb_start_device(struct ebb_balloon *eb)
{
	int err = ebb_find_queues(eb);

	if (err) {
		/* Some may be there, or be errors; the transport has deleted them. */
		memset(eb->vqs, 0, sizeof(eb->vqs));
		return err;
	}
	err = ebb_size_start(eb);
	if (err) {
		ebb_drop_queues(eb);
		return err;
	}
	eb->stopping = false;
	eb->broken = false;
	eb->stopped = false;
	ebb_blocks_start(eb);
	ebb_hinting_start(eb);
	ebb_tell_poison(eb);
	virtio_device_ready(eb->vdev);

	if (ebb_stats_start(eb))
		dev_warn(&eb->vdev->dev, "the device's queue has no room for statistics\n");
	ebb_requests_start(eb);
	ebb_hinting_changed(eb);
	ebb_size_kick(eb);
	return 0;
}

/* After this, nothing is sent, nothing waits for the host, and the host has dropped the balloon. */
static void ebb_stop_device(struct ebb_balloon *eb)
{
	u32 actual = 0;

	mutex_lock(&eb->stop_mutex);
	if (!eb->stopped) {
		spin_lock_irq(&eb->lock);
		eb->stopping = true;
		spin_unlock_irq(&eb->lock);
		mutex_lock(&eb->actual_mutex);
		virtio_cwrite_le(eb->vdev, struct virtio_balloon_config, actual, &actual);
		mutex_unlock(&eb->actual_mutex);
		virtio_reset_device(eb->vdev);
		WRITE_ONCE(eb->broken, true);
		wake_up_all(&eb->acked);
		wake_up_all(&eb->report_wait);
		eb->stopped = true;
	}
	mutex_unlock(&eb->stop_mutex);
}

/* Returns all memory to the guest. */
static void ebb_release_memory(struct ebb_balloon *eb)
{
	cancel_delayed_work_sync(&eb->size_work);
	cancel_work_sync(&eb->stats_work);
	cancel_work_sync(&eb->hinting.work);
	ebb_report_now_stop(eb);
	ebb_requests_stop(eb);
	ebb_hinting_release(eb);
	ebb_size_release(eb);
}

static void ebb_failed_work(struct work_struct *work)
{
	struct ebb_balloon *eb = container_of(work, struct ebb_balloon, failed_work);

	dev_err(&eb->vdev->dev,
		"the device returned a buffer that it did not have: it is reset, its memory comes back\n");
	ebb_stop_device(eb);
	ebb_release_memory(eb);
}

/**
 * ebb_device_failed() - stop using a device that breaks the rules of its queues
 * @eb: the device
 *
 * Can be called from interrupts.
 */
void ebb_device_failed(struct ebb_balloon *eb)
{
	unsigned long flags;

	spin_lock_irqsave(&eb->lock, flags);
	if (!eb->stopping)
		schedule_work(&eb->failed_work);
	spin_unlock_irqrestore(&eb->lock, flags);
}

static void ebb_config_changed(struct virtio_device *vdev)
{
	struct ebb_balloon *eb = vdev->priv;

	atomic_set(&eb->config_changed, 1);
	ebb_size_kick(eb);
	ebb_hinting_changed(eb);
}

static void ebb_note_features(struct ebb_balloon *eb)
{
	u8 forced = READ_ONCE(forced_encoding);

	eb->deflate_on_oom = ebb_offers(eb, VIRTIO_BALLOON_F_DEFLATE_ON_OOM);
	eb->negotiated = 0;
	if (ebb_offers(eb, VIRTIO_BALLOON_F_PAGE_BITMAP))
		eb->negotiated |= BIT(VIRTIO_BALLOON_ENC_BITMAP);
	if (ebb_offers(eb, VIRTIO_BALLOON_F_PAGE_RANGES))
		eb->negotiated |= BIT(VIRTIO_BALLOON_ENC_RANGES);
	/* Page numbers are always allowed in messages. */
	if (eb->negotiated)
		eb->negotiated |= BIT(VIRTIO_BALLOON_ENC_PFNS);
	WRITE_ONCE(device_encodings, ebb_encodings(eb) | eb->negotiated);
	if (forced && !(device_encodings & BIT(forced)))
		dev_err(&eb->vdev->dev, "encoding=%s: was not negotiated, auto is used\n",
			encoding_names[forced]);
}

static int ebb_probe(struct virtio_device *vdev)
{
	struct ebb_balloon *eb;
	int err;

	if (!vdev->config->get) {
		dev_err(&vdev->dev, "the device has no configuration that can be read\n");
		return -EINVAL;
	}
	eb = kzalloc(sizeof(*eb), GFP_KERNEL);
	if (!eb)
		return -ENOMEM;
	vdev->priv = eb;
	eb->vdev = vdev;
	spin_lock_init(&eb->lock);
	spin_lock_init(&eb->report_lock);
	mutex_init(&eb->stop_mutex);
	init_waitqueue_head(&eb->acked);
	init_waitqueue_head(&eb->report_wait);
	INIT_WORK(&eb->failed_work, ebb_failed_work);
	ebb_move_init(eb);
	ebb_size_init(eb);
	ebb_stats_init(eb);
	ebb_note_features(eb);

	eb->wq = alloc_workqueue("ebb_balloon", WQ_FREEZABLE | WQ_MEM_RECLAIM | WQ_UNBOUND, 0);
	err = eb->wq ? ebb_messages_init(eb) : -ENOMEM;
	if (err)
		goto free;
	err = ebb_requests_init(eb) ?: ebb_report_now_init(eb);
	if (err)
		goto free;
	err = ebb_hinting_init(eb);
	if (err)
		goto free;
	err = ebb_start_device(eb);
	if (err)
		goto hinting;
	err = ebb_oom_register(eb);
	if (err)
		goto stop;
	if (eb->vqs[EBB_VQ_REPORTING])
		ebb_trackers_init(eb);
	eb->debugfs = ebb_debugfs_add(eb);
	return 0;

stop:
	ebb_stop_device(eb);
	cancel_work_sync(&eb->failed_work);
	ebb_release_memory(eb);
	ebb_drop_queues(eb);
hinting:
	ebb_hinting_exit(eb);
free:
	ebb_report_now_exit(eb);
	ebb_requests_exit(eb);
	ebb_messages_exit(eb);
	if (eb->wq)
		destroy_workqueue(eb->wq);
	vdev->priv = NULL;
	kfree(eb);
	return err;
}

static void ebb_remove(struct virtio_device *vdev)
{
	struct ebb_balloon *eb = vdev->priv;

	ebb_debugfs_remove(eb->debugfs);
	ebb_stop_device(eb);
	cancel_work_sync(&eb->failed_work);
	/* After a restore that failed, it was stopped before, but has a status again. */
	virtio_reset_device(vdev);
	ebb_trackers_exit(eb);
	ebb_oom_unregister(eb);
	ebb_release_memory(eb);
	ebb_hinting_exit(eb);
	ebb_drop_queues(eb);
	destroy_workqueue(eb->wq);
	ebb_report_now_exit(eb);
	ebb_requests_exit(eb);
	ebb_messages_exit(eb);
	WRITE_ONCE(device_encodings, 0);
	kfree(eb);
}

/* Another kernel may be next (kexec): the host must not discard its memory for this one. */
static void ebb_shut_down(struct device *device)
{
	ebb_stop_device(dev_to_virtio(device)->priv);
}

#ifdef CONFIG_PM_SLEEP
static int ebb_freeze(struct virtio_device *vdev)
{
	struct ebb_balloon *eb = vdev->priv;

	ebb_stop_device(eb);
	cancel_work_sync(&eb->failed_work);
	ebb_trackers_pause(eb);
	ebb_release_memory(eb);
	ebb_drop_queues(eb);
	return 0;
}

static int ebb_restore(struct virtio_device *vdev)
{
	struct ebb_balloon *eb = vdev->priv;
	int err;

	ebb_note_features(eb);
	err = ebb_start_device(eb);
	if (!err)
		ebb_trackers_resume(eb);
	return err;
}
#endif

static int ebb_validate(struct virtio_device *vdev)
{
	if (!want_init_on_free() && !page_poisoning_enabled_static()) {
		__virtio_clear_bit(vdev, VIRTIO_BALLOON_F_PAGE_POISON);
	} else if (!virtio_has_feature(vdev, VIRTIO_BALLOON_F_PAGE_POISON)) {
		/*
		 * A host that does not know the content of free pages may replace it by zeros only
		 * while they are allocated, as hinted and inflated pages are.
		 */
		__virtio_clear_bit(vdev, VIRTIO_BALLOON_F_REPORTING);
		__virtio_clear_bit(vdev, VIRTIO_BALLOON_F_HOST_REQUEST_VQ);
	}

	if (!virtio_has_feature(vdev, VIRTIO_F_VERSION_1)) {
		__virtio_clear_bit(vdev, VIRTIO_BALLOON_F_PAGE_BITMAP);
		__virtio_clear_bit(vdev, VIRTIO_BALLOON_F_PAGE_RANGES);
		__virtio_clear_bit(vdev, VIRTIO_BALLOON_F_HOST_REQUEST_VQ);
	}
	if (!virtio_has_feature(vdev, VIRTIO_BALLOON_F_REPORTING) ||
	    !virtio_has_feature(vdev, VIRTIO_BALLOON_F_HOST_REQUEST_VQ))
		__virtio_clear_bit(vdev, VIRTIO_BALLOON_F_REPORT_REQUEST);
	/* Page frame numbers are always guest-physical. */
	__virtio_clear_bit(vdev, VIRTIO_F_ACCESS_PLATFORM);
	return 0;
}

static const unsigned int features[] = {
	VIRTIO_BALLOON_F_MUST_TELL_HOST,
	VIRTIO_BALLOON_F_STATS_VQ,
	VIRTIO_BALLOON_F_DEFLATE_ON_OOM,
	VIRTIO_BALLOON_F_FREE_PAGE_HINT,
	VIRTIO_BALLOON_F_PAGE_POISON,
	VIRTIO_BALLOON_F_REPORTING,
	VIRTIO_BALLOON_F_PAGE_BITMAP,
	VIRTIO_BALLOON_F_PAGE_RANGES,
	VIRTIO_BALLOON_F_HOST_REQUEST_VQ,
	VIRTIO_BALLOON_F_REPORT_REQUEST,
};

static const struct virtio_device_id ids[] = {
	{ VIRTIO_ID_BALLOON, VIRTIO_DEV_ANY_ID },
	{ 0 },
};
MODULE_DEVICE_TABLE(virtio, ids);

static struct virtio_driver ebb_driver = {
	.driver.name = KBUILD_MODNAME,
	.driver.owner = THIS_MODULE,
	.driver.shutdown = ebb_shut_down,
	.id_table = ids,
	.feature_table = features,
	.feature_table_size = ARRAY_SIZE(features),
	.validate = ebb_validate,
	.probe = ebb_probe,
	.remove = ebb_remove,
	.config_changed = ebb_config_changed,
#ifdef CONFIG_PM_SLEEP
	.freeze = ebb_freeze,
	.restore = ebb_restore,
#endif
};
module_virtio_driver(ebb_driver);

MODULE_DESCRIPTION("virtio memory balloon with blocks, host requests and free page trackers");
MODULE_LICENSE("GPL");
MODULE_VERSION(EBB_VERSION);
