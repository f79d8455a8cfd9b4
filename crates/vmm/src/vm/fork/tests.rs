use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;

use super::clone::{Descriptors, Own};
use super::*;
use crate::checkpoint::{DiskRequest, ForkRequest, MergeRequest, NetRequest, SocketRequest};
use crate::config::{
    DiskConfig, MergeBackend, MergeConfig, MergeOverrides, NetConfig, VmConfig, VsockConfig,
};

fn disk(text: &str) -> DiskConfig {
    text.parse().unwrap()
}

fn template() -> VmConfig {
    let mut template = fuzzing::small_machine().unwrap();
    template.disks = vec![disk("path=/a"), disk("path=/b,readonly=on"), disk("path=/c")];
    template.nets = vec!["fd=3".parse::<NetConfig>().unwrap()];
    template.vsock = Some(VsockConfig { cid: 7, path: "/vsock".into() });
    template
}

fn request() -> ForkRequest {
    let net: NetConfig = "fd=9,mac=02:00:00:00:00:05,rx_ops=7".parse().unwrap();
    let disks = ["path=/1,ops=3", "path=/2,readonly=on", "path=/3,overlay=/4"].map(disk);
    let socket = |path: &str, kept| Some(SocketRequest { path: path.into(), kept });
    ForkRequest {
        companion: true,
        api: socket("/run/api", 0),
        vsock: socket("/run/vsock", 1),
        disks: disks.iter().map(|disk| DiskRequest::of(disk, false)).collect(),
        nets: vec![NetRequest::of(&net)],
        ..ForkRequest::default()
    }
}

/// Companion, API, two for the socket device, five files of disks, and a stream.
fn descriptors() -> Vec<OwnedFd> {
    let socket = || OwnedFd::from(UnixStream::pair().unwrap().0);
    let (stream, peer) = UnixStream::pair().unwrap();
    // It must stay connected.
    std::mem::forget(peer);
    let sockets = (0..4).map(|_| socket());
    let files = (0..6).map(|_| OwnedFd::from(tempfile::tempfile().unwrap()));
    sockets.chain(files).chain([OwnedFd::from(stream)]).collect()
}

#[test]
fn a_machine_gets_its_descriptors_in_the_order_of_the_request() {
    let inode = |file: &OwnedFd| rustix::fs::fstat(file).unwrap().st_ino;
    let mut descriptors = descriptors();
    descriptors.push(tempfile::tempfile().unwrap().into());
    let inodes: Vec<_> = descriptors.iter().map(inode).collect();
    // As it arrives.
    let request = ForkRequest { userfaultfd: true, ..request() };
    let text = serde_json::to_string(&request).unwrap();
    let request: ForkRequest = serde_json::from_str(&text).unwrap();
    let own = Own::receive(request, &mut Descriptors::new(descriptors), &template()).unwrap();
    let (config, resources) = (own.config, own.resources);
    let found = |file: Option<&File>| file.map(|file| file.metadata().unwrap().ino());
    let disks: Vec<_> = resources
        .disks
        .iter()
        .flat_map(|disk| [Some(&disk.top), disk.writeback.as_ref(), disk.base.as_ref()])
        .map(found)
        .collect();
    let some = |index: usize| Some(inodes[index]);
    let expected = [some(4), some(5), None, some(6), None, None, some(7), some(8), some(9)];
    assert_eq!(disks, expected);
    assert_eq!(resources.nets[0].descriptor().map(|fd| inode(&fd)), some(10));
    assert_eq!(found(own.userfaultfd.as_ref()), some(11));
    let vsock = resources.vsock.unwrap();
    assert_eq!((inode(&vsock.listener), vsock.name.index()), (inodes[2], 1));
    assert_eq!((config.vsock.unwrap().cid, config.api), (7, Some("/run/api".into())));
    // What the descriptions of devices leave out.
    assert_eq!(config.disks[0].limits.ops, Some(3));
    assert_eq!(config.nets[0].receive_limits.ops, Some(7));
    let (listener, name) = own.api.unwrap();
    assert_eq!((inode(&listener), name.index()), (inodes[1], 0));
}

#[test]
fn what_merging_needs_comes_last() {
    let merge: MergeOverrides =
        "merge=owner,merge_domain=red,merge_broker=/run/broker".parse().unwrap();
    let merge = merge.apply(MergeConfig::default()).unwrap();
    let inode = |file: &OwnedFd| rustix::fs::fstat(file).unwrap().st_ino;
    let of_devices = descriptors;
    let mut descriptors = of_devices();
    descriptors.extend((0..3).map(|_| OwnedFd::from(tempfile::tempfile().unwrap())));
    let inodes: Vec<_> = descriptors.iter().map(inode).collect();
    let merging = |userfaultfd| {
        let merge = Some(MergeRequest { config: merge.clone(), only_node: Some(3) });
        ForkRequest { userfaultfd, merge, ..request() }
    };
    let receive = |request, descriptors| {
        Own::receive(request, &mut Descriptors::new(descriptors), &template())
    };
    let own = receive(merging(true), descriptors).unwrap();
    assert_eq!(own.userfaultfd.unwrap().metadata().unwrap().ino(), inodes[11]);
    let given = own.merge.unwrap();
    assert_eq!(given.broker.map(|broker| inode(&broker)), Some(inodes[12]));
    assert_eq!(given.link.map(|link| inode(&link.into_fd())), Some(inodes[13]));
    assert_eq!((given.files.only_node, &own.config.memory.merge), (Some(3), &merge));
    // Its memory has pages of others then.
    assert!(!own.config.forkable.is_on());
    let without = receive(merging(false), of_devices()).err().unwrap();
    assert!(without.to_string().contains("/dev/userfaultfd"), "{without}");
    // The kernel's merging comes with the memory.
    let mut merged = template();
    merged.memory.merge.backend = MergeBackend::Kernel;
    let own = Own::receive(request(), &mut Descriptors::new(of_devices()), &merged);
    assert_eq!(own.unwrap().config.memory.merge, merged.memory.merge);
}

#[test]
fn requests_for_another_machine_are_refused() {
    let refused = |change: &dyn Fn(&mut ForkRequest), count: usize| {
        let mut request = request();
        change(&mut request);
        let files = descriptors().into_iter().take(count).collect();
        let own = Own::receive(request, &mut Descriptors::new(files), &template());
        own.err().expect("a refusal").to_string()
    };
    for count in 0..10 {
        let text = refused(&|_| {}, count);
        assert!(text.contains("too few descriptors"), "{count}: {text}");
    }
    let without_companion = refused(&|request| request.companion = false, 11);
    assert!(without_companion.contains("without a companion"), "{without_companion}");
    // Without its network device, so that no descriptor is of the wrong kind.
    let other = |change: &dyn Fn(&mut ForkRequest)| {
        let change = |request: &mut ForkRequest| {
            request.nets.clear();
            change(request);
        };
        refused(&change, 11)
    };
    assert!(other(&|_| {}).contains("network interfaces"));
    assert!(other(&|request| request.vsock = None).contains("--vsock"));
    assert!(other(&|request| drop(request.disks.pop())).contains("--disk"));
    // A file takes the place of the stream.
    let mut files = descriptors();
    let last = files.len() - 1;
    files[last] = tempfile::tempfile().unwrap().into();
    let own = Own::receive(request(), &mut Descriptors::new(files), &template());
    assert!(own.err().unwrap().to_string().contains("no tap interface"));
}

/// Parts that a request may have. If one is refused wherever it occurs, the fuzz target no longer
/// comes to what follows.
#[test]
fn the_fuzz_target_has_requests_of_each_kind_taken() {
    const INPUTS: usize = 4000;
    let mut taken = 0;
    let mut kinds = BTreeMap::new();
    let mut note = |own: &Own| {
        let (config, merge) = (&own.config, own.merge.as_ref());
        let is_merged_by = |backend| config.memory.merge.backend == backend;
        let disk = |has: &dyn Fn(&DiskConfig) -> bool| config.disks.iter().any(has);
        for (kind, is_there) in [
            ("no devices", config.disks.is_empty() && config.nets.is_empty()),
            ("two disks", config.disks.len() == 2),
            ("a read-only disk", disk(&|disk| disk.readonly.is_on())),
            ("a disk with an overlay", disk(&|disk| disk.overlay.is_some())),
            ("a disk of another format", disk(&|disk| disk.format == DiskFormat::Qcow2)),
            ("a direct disk", disk(&|disk| disk.direct.is_on())),
            ("a limited disk", disk(&|disk| disk.limits.bandwidth.is_some())),
            ("a network device", !config.nets.is_empty()),
            ("an MTU", config.nets.iter().any(|net| net.mtu == Some(9000))),
            ("a socket device", config.vsock.is_some()),
            ("another CID", config.vsock.as_ref().is_some_and(|vsock| vsock.cid != 3)),
            ("an API", own.api.is_some()),
            ("no API", own.api.is_none()),
            ("a userfaultfd", own.userfaultfd.is_some()),
            ("merging by its monitor", is_merged_by(MergeBackend::Owner)),
            ("merging by the kernel", is_merged_by(MergeBackend::Kernel)),
            ("no merging", is_merged_by(MergeBackend::Off)),
            ("a broker", merge.is_some_and(|given| given.broker.is_some())),
            ("merging on one node", merge.is_some_and(|given| given.files.only_node.is_some())),
        ] {
            *kinds.entry(kind).or_insert(0) += usize::from(is_there);
        }
        taken += 1;
    };
    let (mut state, mut data) = (0x9e37_79b9_7f4a_7c15_u64, [0; 256]);
    for _ in 0..INPUTS {
        for part in data.chunks_mut(8) {
            // xorshift64 (Marsaglia 2003).
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            part.copy_from_slice(&state.to_le_bytes());
        }
        fuzzing::receive(&data, &mut note).unwrap();
    }
    println!("{taken} of {INPUTS} are taken: {kinds:?}");
    assert!(kinds.len() > 1 && !kinds.values().any(|&count| count == 0), "{kinds:?}");
}
