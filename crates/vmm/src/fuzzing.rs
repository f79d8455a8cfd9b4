//! Fuzz targets: each takes arbitrary bytes, acts as a hostile client, companion or captured
//! monitor with them, or as a user with an odd command line, and panics if this crate misbehaves.
//! They also run as ordinary tests.
//!
//! A new target is a function here or in the module that it tests, a line in [`TARGETS`], and a
//! file of two lines in `fuzz/fuzz_targets`.

use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::api::LimitsChange;
use crate::config::{
    DiskConfig, MemoryConfig, NetConfig, NumaNodeConfig, RateLimits, SerialConfig,
    options::parse_balloon,
};
use crate::devices::throttle::{Admission, Throttle};
use crate::isolation::CgroupConfig;

pub use crate::devices::virtio::block::fuzz_qcow2_images as qcow2_images;
pub use crate::devices::virtio::net::{fuzz_net as net_chains, fuzzed_chains};
pub use crate::devices::virtio::vsock::{fuzz_chains as vsock_chains, hostile_chains};
pub use crate::firecracker::fuzz_request as firecracker_request;
pub use crate::isolation::{
    fuzz_companion_replies as companion_replies, fuzz_companion_requests as companion_requests,
};
pub use crate::mmds::fuzz_frames as mmds_frames;
pub use crate::vm::{fuzz_descriptors as api_descriptors, fuzz_fork_requests as fork_requests};

/// A fuzz target by name.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 11] = [
    ("api_descriptors", api_descriptors),
    ("companion_replies", companion_replies),
    ("companion_requests", companion_requests),
    ("firecracker_request", firecracker_request),
    ("fork_requests", fork_requests),
    ("mmds_frames", mmds_frames),
    ("net_chains", net_chains),
    ("option_texts", option_texts),
    ("qcow2_images", qcow2_images),
    ("rate_limits", rate_limits),
    ("vsock_chains", vsock_chains),
];

/// Far longer than anything here takes, so that a target that hangs ends.
pub(crate) const PATIENCE: Timespec = Timespec { tv_sec: 20, tv_nsec: 0 };

/// Reads choices from the bytes; zeros at their end.
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub(crate) fn new(data: &'a [u8]) -> Self {
        Self(data)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or_default()
    }

    /// A number below `limit`, which is at least 1.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        usize::from(self.byte()) % limit
    }

    /// True once in four times.
    pub(crate) fn rarely(&mut self) -> bool {
        self.below(4) == 0
    }

    /// One of `choices`, which are not empty.
    pub(crate) fn one<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Up to `count` bytes.
    pub(crate) fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// A number of any size; small ones and powers of two are more frequent than by chance.
    pub(crate) fn number(&mut self) -> u64 {
        match self.byte() % 4 {
            0 => u64::from(self.byte()),
            1 => 1 << (self.byte() % 64),
            2 => u64::MAX >> (self.byte() % 64),
            _ => self.take(8).iter().fold(0, |number, byte| number << 8 | u64::from(*byte)),
        }
    }
}

/// Sends bytes and descriptors without waiting.
pub(crate) fn send(
    socket: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(descriptors)), "at most 64");
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags)?)
}

/// A pipe whose writing end is sent to the code under test, to find out whether that keeps it.
pub(crate) struct Leak {
    reader: io::PipeReader,
    writer: io::PipeWriter,
}

impl Leak {
    pub(crate) fn new() -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        Ok(Self { reader, writer })
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.writer.as_fd()
    }

    /// Panics if any copy of the descriptor stays open. A copy that another thread of this process
    /// takes along into a new process goes with its exec.
    pub(crate) fn check(self) -> io::Result<()> {
        drop(self.writer);
        let ready = poll(&mut [PollFd::new(&self.reader, PollFlags::IN)], Some(&PATIENCE))?;
        assert!(ready == 1, "a descriptor that came with a message stays open");
        Ok(())
    }
}

/// Runs a body whose preparations may fail, which is not a fault of the code under test.
pub(crate) fn prepared(result: io::Result<()>) {
    if let Err(error) = result {
        panic!("this host is not fit for fuzzing: {error}");
    }
}

/// Limits as texts of options and of the API, and any changes and requests with them: nothing
/// overflows, no wait is endless, and between two changes never more than the burst (or one larger
/// request) and the rate passes.
pub fn rate_limits(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Ok(limits) = RateLimits::parse_rng(&text) {
        check_limits(&limits);
    }
    if let Ok(change) = serde_json::from_slice::<LimitsChange>(data) {
        let _ = RateLimits::default().changed(&change.limits);
    }
    let mut input = Input::new(data);
    let mut now = Instant::now();
    let throttle = Throttle::new(limits_from(&mut input), now);
    let mut passed = Passed::new(&throttle, now);
    for _ in 0..200 {
        if input.is_empty() {
            break;
        }
        let step = Duration::from_nanos(input.number() >> 8);
        match input.byte() % 8 {
            0 => {
                if let Ok(limits) = throttle.limits().changed(&limits_from(&mut input)) {
                    throttle.set(limits, now);
                    assert!(throttle.resume_at().is_none());
                    passed = Passed::new(&throttle, now);
                }
            }
            1 => now = now.checked_add(step).unwrap_or(now),
            2 => now = throttle.resume_at().unwrap_or(now).max(now),
            // A clock that goes back.
            3 => {
                let before = now.checked_sub(step).unwrap_or(now);
                let _ = throttle.resume(before);
                if throttle.admit(1, before) == Admission::Now {
                    passed.add(1, now);
                }
            }
            _ => {
                let bytes = input.number();
                if throttle.admit(bytes, now) == Admission::Now {
                    passed.add(bytes, now);
                    assert!(throttle.resume_at().is_none());
                } else {
                    assert!(throttle.resume_at().is_some_and(|at| at > now));
                }
            }
        }
    }
}

/// Any limits, also those that neither options nor the API accept.
fn limits_from(input: &mut Input<'_>) -> RateLimits {
    let given = input.byte();
    let mut value = |bit: u8| (given & 1 << bit != 0).then(|| input.number());
    RateLimits {
        bandwidth: value(0),
        bandwidth_burst: value(1),
        ops: value(2),
        ops_burst: value(3),
    }
}

/// What options accept: a limit is not zero, and no burst is without its limit.
fn check_limits(limits: &RateLimits) {
    for (limit, burst) in
        [(limits.bandwidth, limits.bandwidth_burst), (limits.ops, limits.ops_burst)]
    {
        assert!(limit != Some(0) && burst != Some(0) && (limit.is_some() || burst.is_none()));
    }
}

/// What has passed since a change of the limits.
struct Passed {
    limits: RateLimits,
    since: Instant,
    bytes: u128,
    largest: u64,
    requests: u128,
}

impl Passed {
    fn new(throttle: &Throttle, since: Instant) -> Self {
        Self { limits: throttle.limits(), since, bytes: 0, largest: 0, requests: 0 }
    }

    fn add(&mut self, bytes: u64, now: Instant) {
        self.bytes += u128::from(bytes);
        self.largest = self.largest.max(bytes);
        self.requests += 1;
        let elapsed = now.duration_since(self.since).as_nanos();
        let most = |rate: u64, burst: Option<u64>, largest: u64| {
            let rate = rate.max(1);
            let burst = burst.unwrap_or(rate / 10).max(1);
            let gained = elapsed.saturating_mul(u128::from(rate)) / 1_000_000_000;
            u128::from(burst.max(largest)).saturating_add(gained)
        };
        if let Some(rate) = self.limits.bandwidth {
            assert!(self.bytes <= most(rate, self.limits.bandwidth_burst, self.largest));
        }
        if let Some(rate) = self.limits.ops {
            assert!(self.requests <= most(rate, self.limits.ops_burst, 1));
        }
    }
}

/// Texts of options: each is refused or understood. The first line is the text, the others an
/// account file for `--user`.
pub fn option_texts(data: &[u8]) {
    let all = String::from_utf8_lossy(data);
    let (text, accounts) = all.split_once('\n').unwrap_or((&all, ""));
    if let Ok(disk) = text.parse::<DiskConfig>() {
        check_limits(&disk.limits);
    }
    if let Ok(SerialConfig::File { max, .. }) = text.parse() {
        assert!(max.bytes() >= 4096);
    }
    let refused = [
        text.parse::<CgroupConfig>().err(),
        text.parse::<MemoryConfig>().err(),
        text.parse::<NumaNodeConfig>().err(),
        parse_balloon(text).err(),
        text.parse::<NetConfig>().err(),
    ];
    for error in refused.into_iter().flatten() {
        assert!(error.option.starts_with("--") && !error.remedy.is_empty(), "{error}");
    }
    crate::isolation::fuzz_user(text, accounts);
    let path = data.split(|byte| *byte == b'\n').next().unwrap_or_default();
    crate::isolation::fuzz_allowed_directory(Path::new(OsStr::from_bytes(path)));
}

#[cfg(test)]
mod tests;
