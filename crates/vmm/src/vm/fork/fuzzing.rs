//! Fuzz target: a client of a checkpoint that sends anything, up to the point where a machine would
//! be built from it.

use std::fs::File;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;

use serde_json::{Value, json};

use super::clone::{Descriptors, Own};
use crate::checkpoint::{ForkRequest, Request};
use crate::config::{
    DiskConfig, NetConfig, RebootAction, SerialConfig, Switch, VmConfig, VsockConfig,
};
use crate::fuzzing::{Input, Leak, prepared, send};
use crate::isolation::IsolationConfig;
use crate::packet;

/// Requests as bytes or as documents with any members, with any descriptors: they are refused or
/// taken, a machine that would be built has as many devices as the checkpoint, and no descriptor is
/// kept.
pub fn fuzz_fork_requests(data: &[u8]) {
    prepared(receive(data, &mut |_| {}));
}

/// Sends what the bytes say, and shows what was made of a request that is taken.
pub(super) fn receive(data: &[u8], taken: &mut dyn FnMut(&Own)) -> io::Result<()> {
    let mut input = Input::new(data);
    let leak = Leak::new()?;
    let (client, server) = packet::pair()?;
    let (gone, _) = UnixStream::pair()?;
    // Connected, but its other end sends nothing: waiting for an answer ends at once.
    let (stream, peer) = UnixStream::pair()?;
    peer.shutdown(Shutdown::Write)?;
    let null = File::open("/dev/null")?;
    let kinds = [leak.descriptor(), gone.as_fd(), stream.as_fd(), null.as_fd(), client.as_fd()];
    let template = template(&mut input)?;
    let text = if input.rarely() {
        input.take(200).to_vec()
    } else {
        serde_json::to_vec(&document(&mut input, &template))?
    };
    // Most often enough streams, which are of no wrong kind.
    let count = if input.rarely() { input.below(12) } else { 12 };
    let has_others = input.rarely();
    let kind = |input: &mut Input<'_>| {
        if has_others && input.rarely() { input.one(&kinds) } else { kinds[2] }
    };
    let descriptors: Vec<_> = (0..count).map(|_| kind(&mut input)).collect();
    if send(&client, &text, &descriptors).is_err() {
        // Longer than a packet.
        return Ok(());
    }
    if let Ok(Some((Request::Fork(request), descriptors))) = packet::receive(&server) {
        take(*request, descriptors, &template, taken);
    }
    drop((client, server));
    leak.check()
}

fn take(
    request: ForkRequest,
    files: Vec<OwnedFd>,
    template: &VmConfig,
    taken: &mut dyn FnMut(&Own),
) {
    let Ok(own) = Own::receive(request, &mut Descriptors::new(files), template) else { return };
    let (config, resources) = (&own.config, &own.resources);
    assert_eq!(config.disks.len(), template.disks.len());
    assert_eq!(resources.disks.len(), template.disks.len());
    assert_eq!(config.nets.len(), template.nets.len());
    assert_eq!(resources.nets.len(), template.nets.len());
    assert_eq!(config.vsock.is_some(), template.vsock.is_some());
    assert_eq!((config.cpus, config.memory.size), (template.cpus, template.memory.size));
    taken(&own);
}

/// The configuration of a machine that can be forked, without devices.
pub(super) fn small_machine() -> io::Result<VmConfig> {
    Ok(VmConfig {
        boot: None,
        cmdline: String::new(),
        cpus: 1,
        memory: "64M".parse().map_err(io::Error::other)?,
        numa: Vec::new(),
        balloon: None,
        disks: Vec::new(),
        rng: None,
        nets: Vec::new(),
        vsock: None,
        serial: SerialConfig::Null,
        api: None,
        seccomp: Switch::On,
        isolation: IsolationConfig::default(),
        on_reboot: RebootAction::Exit,
        clock: ebb_kvm_clock::ClockPolicy::Continue,
        forkable: Switch::On,
    })
}

fn template(input: &mut Input<'_>) -> io::Result<VmConfig> {
    let disk = DiskConfig {
        path: "/base".into(),
        readonly: Switch::from_bool(input.rarely()),
        format: crate::api::DiskFormat::Raw,
        overlay: None,
        direct: Switch::Off,
        limits: crate::config::RateLimits::default(),
    };
    let net = input.one(&["fd=3", "fd=3,mtu=9000"]);
    Ok(VmConfig {
        disks: vec![disk; input.below(3)],
        nets: net.parse::<NetConfig>().into_iter().take(input.below(2)).collect(),
        vsock: (input.below(2) == 1).then(|| VsockConfig { cid: 3, path: "/vsock".into() }),
        ..small_machine()?
    })
}

/// A request, most often one that fits the machine.
fn document(input: &mut Input<'_>, template: &VmConfig) -> Value {
    let socket = |input: &mut Input<'_>, wanted: bool| match input.below(3) {
        _ if wanted == input.rarely() => Value::Null,
        1 => json!({ "path": "/run/a", "kept": input.number() as u32 }),
        _ => json!({ "path": "relative", "kept": 0 }),
    };
    let limits = json!({ "bandwidth": input.number(), "ops": 1 });
    let disk = |input: &mut Input<'_>| {
        json!({
            "config": {
                "path": "/image",
                "readonly": input.rarely(),
                "format": if input.rarely() { "other" } else { input.one(&["raw", "qcow2"]) },
                "overlay": input.rarely().then_some("/overlay"),
            },
            "direct": input.one(&["on", "off"]),
            "limits": limits,
            "is_copy": input.rarely(),
        })
    };
    let number = |input: &mut Input<'_>, wanted: usize| {
        if input.rarely() { input.below(4) } else { wanted }
    };
    let disks: Vec<_> = (0..number(input, template.disks.len())).map(|_| disk(input)).collect();
    let net = json!({
        "config": {
            "backend": { "descriptor": 5 },
            "mac": null,
            "mtu": input.rarely().then_some(9000),
        },
        "receive_limits": limits,
        "transmit_limits": {},
    });
    let is_merged = input.rarely();
    let mut request = json!({
        "cgroup": null,
        "companion": !input.rarely(),
        "api": socket(input, true),
        "vsock": socket(input, template.vsock.is_some()),
        "cid": input.rarely().then(|| input.number() as u32),
        "disks": disks,
        "nets": vec![net; number(input, template.nets.len())],
        // Merging needs it.
        "userfaultfd": is_merged != input.rarely(),
        "merge": is_merged.then(|| json!({
            "config": {
                "backend": input.one(&["owner", "kernel", "off"]),
                "domain": input.one(&[None, Some("red"), Some("../")]),
                "broker": input.one(&[None, Some("/broker")]),
                "across_nodes": null,
            },
            "only_node": input.rarely().then(|| input.number() as u32),
        })),
        "paused": false,
        "accept_changed_disks": true,
    });
    if input.rarely() {
        let names = ["cgroup", "companion", "api", "disks", "nets", "merge", "unknown"];
        request[input.one(&names)] = input.one(&[0_i64, -1, i64::MAX]).into();
    }
    json!({ "fork": request })
}
