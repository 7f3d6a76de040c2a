"""Kernels for the CPU, compiled by Numba. Without Numba only ``accelerator``, ``linear`` and
``ahead`` can be imported.

A matrix product ``left x right`` is at the bottom of nearly everything here: x times a weight,
queries times keys, weights of attention times values. ``left`` is a few rows; ``right`` is streamed
from memory. Words that mean the same in every file of this folder. First, sizes:

========  =========================================================================================
unit      four bytes of memory: one float32, two bfloat16 or four bytes. Left and right are
          multiplied unit by unit. There is one exception: where a processor cannot multiply
          bfloat16, a unit of left is two float32, eight bytes (``simd``, WIDE)
column    16 outputs of a weight (or 16 ranks of an adapter). In memory it is a sequence of vectors.
          Each vector has one unit of inputs, of all 16 outputs side by side. ``product_kernel``
          draws it. Two neighbouring columns are a *pair*
group     16 tokens of one KV head in the cache (``cache_groups``)
span      256 keys: one turn of the online softmax
split     512 keys, after which the softmax begins anew (as in split-K). The splits of a decode are
          computed side by side
item      a part of a kernel's work. The threads of a team take items one by one, by adding 1 to a
          counter that they share, until none is left. Each kernel says what its items are
========  =========================================================================================

Two more are the processor's. A *vector* is 16 lanes of four bytes, 64 bytes. A *tile* is 16
vectors, 1,024 bytes: what a tile register of AMX holds. Weights of 4 bits have a *scale group*:
the inputs that share a scale (``four_bit_kernel``).

Then, names of arguments:

===========  ======================================================================================
tag          a value whose *type* says which elements a kernel is compiled for (``simd``)
call         the arguments of a kernel, read from the record that the host filled (``compiled``).
             ``attention_call`` is the model's: an ``interface.AttentionCall``
rows         rows of x, or (token, query head) pairs of attention: what one kernel call works on
batch_row    the index of a sequence in the step, which the rest of the engine calls a row
piece        some tokens of a batch row and the keys that they see (``attention_plan``)
padded       the head size in the cache: the model's head size, rounded up to a multiple of 16. The
             elements behind the model's are zeros
use_tiles    whether the tile unit is to be used, where there is one
shaped       for how many rows this thread's tile registers are set at the moment; 0: they are not.
             A function that may set them anew takes it as an argument and returns its new value
first, end   a range, as of rows. ``end`` is the first number behind it
last         the last number that is in a range. Two records of ``execution.low_rank``, ``Part`` and
             ``AdapterSpan``, call the first number behind it ``last`` (``adapter_table``)
spare        memory that the caller lends: what it holds is overwritten
..._body     the function that each thread of a kernel runs: it takes items until none is left
===========  ======================================================================================

The order of reading. Each file builds on those above it, and says who calls it::

    emit             LLVM code by a builder, as Numba functions       } how kernels are written
    processor        instruction sets that kernels are made for       }
    simd             vectors, memory and element types                }
    code_folders     folders of compiled code, and their removal      }
    code_cache       compiled code, kept from load to load            }
    compiled         records, machine code, threads                   }

    amx, dot         instructions: tiles; products of units           } the products that all
    micro_kernel     a few rows times a few vectors, in registers     } others are made of

    cache_groups     16 tokens in the cache                           } attention
    attention_plan   a step cut into pieces                           }
    attention_records  arguments and scratch memory                   }
    cache_blocks     blocks of the paged cache as groups              }
    softmax          the online softmax of a row                      }
    attention_rows   a few rows against a span of keys                }
    attention_spans  all rows of an item against a split              }
    attention_kernel   items of the plan, their splits                }
    ahead            this kernel compiled in another process          }
    paged_attention  the attention function "cpu"                     }

    convert_kernel   x as a product reads it: wider, or bytes         } linear layers
    product_call     arguments of the products, and sizes             }
    product_tiles    a few rows times two columns, by tiles           }
    product_finish   bias, activation and rounding after a product    }
    product_kernel   x times a packed weight                          }
    four_bit_vectors, four_bit_kernel   x times a weight of 4 bits    }
    packed_weight    weights in the order of these kernels            }
    column_linear    a linear layer of these kernels                  }
    linear           a linear layer of oneDNN's product               }

    norm_rotary_kernel   RMS norm and rotary embedding                } all that a layer has
    gate_kernel      a gate on a result, and a norm beside it         }
    adapter_table, adapter_kernel   LoRA                              }

    state_records    arguments of kernels with states                 } layers with states
    conv_kernel      short convolutions                               }
    delta_kernel     the gated delta rule                             }
    scan_kernel      the recurrence of Mamba 2                        }
    state_layer      what such a layer computes                       }

    head_product     a product for each head                          } latents
    latent_kernel    attention over latents                           }
    latent_layer     what such a layer computes                       }

    program_kernel, program_list, program_fit, program                } all layers as one call

    layer_kernels    what fused modules are made with                 } the way in
    accelerator      what a load takes                                }
"""
