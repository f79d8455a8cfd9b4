//! Disks: the table, and changes of their sizes.

use ebb_vmm::api::{Client, DiskFormat, DiskInfo, DiskResize, DisksInfo};
use ebb_vmm::size::ByteSize;

use super::{Row, bytes, row};

#[derive(Debug, clap::Args)]
pub(super) struct DisksArgs {
    #[command(subcommand)]
    action: Option<DisksAction>,
}

#[derive(Debug, clap::Subcommand)]
enum DisksAction {
    /// Show the disks
    Show,
    /// Give a disk the size of its image, which you have enlarged before (truncate, lvextend), and
    /// notify the guest
    Resize {
        /// The disk: disk0 and further
        #[arg(value_name = "DEVICE")]
        device: String,
        /// New size of an image in the format qcow2, which is enlarged by this; omit it for a raw
        /// image
        #[arg(value_name = "SIZE")]
        size: Option<ByteSize>,
    },
}

/// Carries out the command and returns the resulting disks.
pub(super) fn execute(args: DisksArgs, client: &Client) -> anyhow::Result<DisksInfo> {
    match args.action {
        None | Some(DisksAction::Show) => Ok(client.get("/disks")?),
        Some(DisksAction::Resize { device, size }) => {
            let size_bytes = size.map(ByteSize::bytes);
            Ok(client.put_json("/disks", &DiskResize { device, size_bytes })?)
        }
    }
}

/// Rows of the table.
pub(super) fn rows(info: &DisksInfo) -> Vec<Row> {
    info.disks.iter().map(|disk| row(&disk.device, describe(disk))).collect()
}

fn describe(disk: &DiskInfo) -> String {
    let format = match disk.format {
        DiskFormat::Raw => "raw",
        DiskFormat::Qcow2 => "qcow2",
    };
    let size = bytes(disk.size_bytes);
    let readonly = if disk.readonly { ", read-only" } else { "" };
    let direct = if disk.direct { ", direct" } else { "" };
    let requests = &disk.requests;
    let read = bytes(requests.read_bytes);
    let written = bytes(requests.written_bytes);
    let discarded = bytes(requests.discarded_bytes);
    format!(
        "{size}, {format}{readonly}{direct}; {read} read, {written} written, {discarded} discarded, \
         {} errors",
        requests.errors
    )
}
